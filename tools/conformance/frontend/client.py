"""A client of the server under test: short ways to ask it."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

MODEL = "served"
PROMPT = "What is machine learning?"
MESSAGES = [{"role": "user", "content": PROMPT}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Frontend:
    """The server, by its HTTP interface."""

    http: httpx.Client

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """A request with the model's name and the usual prompt, unless `fields` say otherwise."""
        usual = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
        body = {"model": MODEL, **usual, **fields}
        return self.http.post(path, json={k: v for k, v in body.items() if v is not ...})

    def good(self, path: str, **fields: Any) -> Any:
        """The answer to a request that has to be served."""
        response = self.post(path, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, path: str, **fields: Any) -> str:
        """The first choice's text."""
        choice = self.good(path, **fields)["choices"][0]
        return str(choice["message"]["content"] if path == CHAT else choice["text"])

    def chunks(self, path: str, **fields: Any) -> list[Any]:
        """The events of a stream, without the last one."""
        response = self.post(path, stream=True, **fields)
        assert response.status_code == 200, response.text
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


def text_of(chunks: list[Any], path: str) -> str:
    """All parts of the first choice's text."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if path == CHAT:
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return "".join(choice["text"] for choice in choices)
