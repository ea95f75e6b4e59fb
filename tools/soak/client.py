"""A client of one server: requests that must succeed, and the numbers of /metrics."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

PREFIX = "trtllm_lite_"
CHAT = "/v1/chat/completions"
GOLDEN = {"messages": [{"role": "user", "content": "Name three colours."}], "temperature": 0}
POLL_SECONDS = 0.002
UNTIL_SECONDS = 60.0


def conversation(text: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def tokens_of(events: str) -> tuple[str, bool]:
    """The text of a stream of chat events, and whether it came to its end."""
    frames = [frame for frame in events.split("\n\n") if frame.startswith("data: ")]
    whole = bool(frames) and frames[-1] == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[: -1 if whole else None]]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, whole and not any("error" in chunk for chunk in chunks)


def numbers(text: str) -> dict[str, float]:
    """The metrics of an exposition by name, summed over their labels, without our prefix."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(PREFIX):
            name, _, value = line.rpartition(" ")
            key = name.partition("{")[0].removeprefix(PREFIX)
            found[key] = found.get(key, 0.0) + float(value)
    return found


class Client:
    """Requests of the soak itself, while nobody else asks."""

    def __init__(self, url: str, connections: int = 512) -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=16)
        self.http = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def golden(self) -> str:
        """The greedy answer that must never change."""
        answer = await self.post(CHAT, {**GOLDEN, "max_tokens": 16})
        text: str = answer["choices"][0]["message"]["content"]
        return text

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises httpx.HTTPError unless it is answered with 200."""
        answer = await self.http.post(path, json=body)
        answer.raise_for_status()
        made: dict[str, Any] = answer.json()
        return made

    async def room(self) -> int:
        """Tokens of the context."""
        answer = await self.http.get("/v1/models")
        answer.raise_for_status()
        tokens: int = answer.json()["data"][0]["max_model_len"]
        return tokens

    async def numbers(self) -> dict[str, float]:
        """/metrics."""
        answer = await self.http.get("/metrics")
        answer.raise_for_status()
        return numbers(answer.text)

    async def until_idle(self) -> float:
        """Seconds until nothing runs, waits or holds a slot. Raises TimeoutError."""
        names = ("requests_running", "requests_waiting", "kv_slots_used")
        return await self.until(lambda now: not any(now[name] for name in names))

    async def until(self, condition: Callable[[Mapping[str, float]], bool]) -> float:
        """Seconds until /metrics shows it. Raises TimeoutError after a minute."""
        began = time.monotonic()
        async with asyncio.timeout(UNTIL_SECONDS):
            while not condition(await self.numbers()):
                await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - began
