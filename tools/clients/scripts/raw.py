"""Plain HTTP beside the client under test: what its answers are compared with."""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trtllm_lite.tools.clients.scripts.checks import Target

TIMEOUT = 300
IDLE_SECONDS = 60
CHOICES = 128
"""More sequences than the server lets in at once: one request may have so many if it is alone."""
QUESTION = "What is the capital of France?"
SHAPE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "London", "Rome"]},
        "large": {"type": "boolean"},
    },
    "required": ["city", "large"],
    "additionalProperties": False,
}
"""A schema whose texts are short: a small model ends them."""
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "show_city", "description": "Shows a city.", "parameters": SHAPE},
}


@dataclass(frozen=True)
class Answer:
    """One response, whole."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    def json(self) -> Any:
        return json.loads(self.data)


def ask(
    target: Target, path: str, body: Mapping[str, Any] | None = None, key: str | None = None
) -> Answer:
    """GET, or POST where there is a body, with the target's key unless another is given."""
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=TIMEOUT)
    try:
        send(connection, path, body, target.key if key is None else key)
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())
    finally:
        connection.close()


def send(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any] | None, key: str
) -> None:
    """Write the request; the answer is not waited for."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, headers)


def conversation(text: str = QUESTION) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(target: Target, text: str = QUESTION, **fields: Any) -> Any:
    """The JSON of a greedy answer. Raises AssertionError for any other status than 200."""
    body = {"messages": conversation(text), "temperature": 0, "max_tokens": 32, **fields}
    answer = ask(target, "/v1/chat/completions", body)
    assert answer.status == 200, answer.data
    return answer.json()


def chat_text(target: Target, text: str = QUESTION, **fields: Any) -> str:
    made: str = chat(target, text, **fields)["choices"][0]["message"]["content"]
    assert made.strip()
    return made


def chat_texts(target: Target, texts: Sequence[str], **fields: Any) -> list[str]:
    """Answers one after the other, once the beginnings of all prompts are kept: the rest of such a
    prompt is computed in other pieces, and what is quantized is then rounded another way."""
    for text in texts:
        chat(target, text, **{**fields, "max_tokens": 1})
    return [chat_text(target, text, **fields) for text in texts]


def complete(target: Target, prompt: Any, **fields: Any) -> Any:
    """The JSON of a greedy completion."""
    answer = ask(target, "/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
    assert answer.status == 200, answer.data
    return answer.json()


def tokens_of(target: Target, text: str) -> list[int]:
    made: list[int] = ask(target, "/tokenize", {"prompt": text}).json()["tokens"]
    assert made
    return made


def too_long(target: Target) -> str:
    """A text of more tokens than the context has: each word is one at least."""
    return "word " * (target.context + 1)


def raised(work: Callable[..., object], **fields: Any) -> Any:
    """The exception that ends the call. Raises AssertionError where there is none."""
    try:
        work(**fields)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def metrics(target: Target) -> dict[str, float]:
    """Every series of /metrics by its name with labels."""
    made = {}
    for line in ask(target, "/metrics").data.decode().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            made[name] = float(value)
    return made


def total(series: Mapping[str, float], name: str) -> float:
    """The sum over all labels."""
    name = f"trtllm_lite_{name}"
    found = [value for key, value in series.items() if key.partition("{")[0] == name]
    assert found, f"/metrics has no {name}"
    return sum(found)


def wait_until_idle(target: Target) -> dict[str, float]:
    """The metrics once every accepted request has ended. Raises AssertionError for a server that
    does not come to that."""
    end = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < end:
        series = metrics(target)
        ended = sum(
            total(series, f"requests_{way}_total") for way in ("finished", "aborted", "failed")
        )
        busy = total(series, "requests_running") + total(series, "requests_waiting")
        if not busy and ended == total(series, "requests_accepted_total"):
            return series
        time.sleep(0.1)
    raise AssertionError(f"the server has work left after {IDLE_SECONDS} s")


@contextmanager
def full_queue(target: Target) -> Iterator[Callable[[], None]]:
    """Every place of the server is taken until the function given is called, or the block ends."""
    wait_until_idle(target)
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=TIMEOUT)
    body = {
        **{"prompt": "Once upon a time", "n": CHOICES, "max_tokens": target.context // 2},
        **{"ignore_eos": True, "temperature": 1, "stream": True},
    }
    send(connection, "/v1/completions", body, target.key)
    response = connection.getresponse()

    def free() -> None:
        # The socket is closed only when both have let go of it.
        response.close()
        connection.close()

    try:
        assert response.status == 200, response.read()
        assert response.readline().startswith(b"data: ")
        yield free
    finally:
        free()
        wait_until_idle(target)
