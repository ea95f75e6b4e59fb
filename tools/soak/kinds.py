"""The requests of the mixed load: what clients do, rightly and wrongly, and what they must get."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from trtllm_lite.tools.soak.client import CHAT, conversation, tokens_of
from trtllm_lite.tools.soak.sizes import Sizes

WORDS = (
    *("river", "mill", "swallow", "roof", "count", "slow"),
    *("old", "past", "under", "water", "stone", "light"),
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
BUSY = 503
OVERSIZED = 9 * 2**20
BAD_BODIES: tuple[tuple[str, bytes, int], ...] = (
    (CHAT, b'{"messages": [', 400),
    (CHAT, b"[]", 400),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, json.dumps(conversation("x", temperature=9)).encode(), 400),
    (CHAT, json.dumps(conversation("x", n=10**9)).encode(), 400),
    (CHAT, json.dumps(conversation("x", model="nobody")).encode(), 404),
    (CHAT, json.dumps(conversation("x", guided_regex="(")).encode(), 400),
    (CHAT, json.dumps(conversation("x", chat_template="{{ 1 }}")).encode(), 400),
    (CHAT, b"[" * 100_000, 400),
    ("/v1/completions", b'{"prompt": [-1]}', 400),
    ("/v1/nothing", b"{}", 404),
    ("/v1/models", b"{}", 405),
)


class UnexpectedAnswerError(Exception):
    """The answer is not what the request had to get."""


@dataclass(frozen=True)
class Load:
    """What a kind of request is made with."""

    http: httpx.AsyncClient
    random: random.Random
    sizes: Sizes

    def text(self, words: int) -> str:
        return " ".join(self.random.choice(WORDS) for _ in range(words))


async def whole(load: Load) -> None:
    tokens = load.random.randint(1, load.sizes.answer)
    fields = {"max_tokens": tokens, "seed": 1, "temperature": 1.0}
    answer = await load.http.post(CHAT, json=conversation(load.text(load.sizes.short), **fields))
    check(answer, 200)


async def streamed(load: Load) -> None:
    await read_stream(load, 0.0, max_tokens=load.random.randint(1, load.sizes.answer))


async def slow_reader(load: Load) -> None:
    await read_stream(load, 0.05, max_tokens=load.sizes.answer)


async def read_stream(load: Load, pause: float, **fields: Any) -> None:
    body = conversation(load.text(load.sizes.short), stream=True, **fields)
    async with load.http.stream("POST", CHAT, json=body) as answer:
        if answer.status_code == BUSY:
            return
        parts = []
        async for part in answer.aiter_text():
            parts.append(part)
            await asyncio.sleep(pause)
    check(answer, 200)
    if not tokens_of("".join(parts))[1]:
        raise UnexpectedAnswerError(f"a stream ended early: {parts[-1][-200:]!r}")


async def constrained(load: Load) -> None:
    body = conversation(load.text(4), guided_json=SCHEMA, max_tokens=60)
    answer = await load.http.post(CHAT, json=body)
    if check(answer, 200):
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])


async def with_tools(load: Load) -> None:
    """A template without tools refuses them."""
    body = conversation(load.text(4), tools=[TOOL], tool_choice="required", max_tokens=40)
    check(await load.http.post(CHAT, json=body), 200, 400)


async def several(load: Load) -> None:
    body = {"prompt": [load.text(3), load.text(5)], "n": 2, "max_tokens": 8, "echo": True}
    answer = await load.http.post("/v1/completions", json=body)
    if check(answer, 200) and len(answer.json()["choices"]) != 4:
        raise UnexpectedAnswerError("two prompts with two choices each are four choices")


async def bad(load: Load) -> None:
    path, body, status = load.random.choice(BAD_BODIES)
    headers = {"content-type": "application/json"}
    check(await load.http.post(path, content=body, headers=headers), status)


async def oversized(load: Load) -> None:
    body = b'{"prompt": "' + b"x" * OVERSIZED + b'"}'
    headers = {"content-type": "application/json"}
    try:
        answer = await load.http.post("/v1/completions", content=body, headers=headers)
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        return  # the server does not read it, and the answer may be lost with the connection
    check(answer, 413)


async def beside(load: Load) -> None:
    """The routes that do not generate."""
    paths = ("/health", "/metrics", "/v1/models", "/version", "/v1/capabilities")
    check(await load.http.get(load.random.choice(paths)), 200)
    body = {"prompt": load.text(load.sizes.short)}
    check(await load.http.post("/tokenize", json=body), 200)


def endless(load: Load, words: int, **fields: Any) -> dict[str, Any]:
    tokens = load.sizes.endless
    return conversation(load.text(words), max_tokens=tokens, ignore_eos=True, **fields)


async def leaves_stream(load: Load) -> None:
    body = endless(load, load.sizes.short, stream=True)
    async with load.http.stream("POST", CHAT, json=body) as answer:
        if not check(answer, 200):
            return
        wanted = load.random.randint(1, 6)
        async for _ in answer.aiter_text():
            wanted -= 1
            if wanted <= 0:
                return


async def leaves_early(load: Load) -> None:
    """While it waits, or while the prompt is computed."""
    body = endless(load, load.random.choice((load.sizes.short, load.sizes.long)))
    try:
        async with asyncio.timeout(load.random.uniform(0.005, 0.3)):
            check(await load.http.post(CHAT, json=body), 200)
    except TimeoutError:
        return


def check(answer: httpx.Response, *allowed: int) -> bool:
    """False when the server was busy. Raises UnexpectedAnswerError for what is not allowed."""
    status = answer.status_code
    if status == BUSY and "retry-after" in answer.headers:
        return False
    if status not in allowed:
        method = answer.request.method
        raise UnexpectedAnswerError(f"{method} {answer.request.url.path} got {status}")
    return True


Kind = Callable[[Load], Awaitable[None]]
KINDS: tuple[tuple[Kind, int], ...] = (
    *((whole, 4), (streamed, 6), (slow_reader, 1), (constrained, 3), (with_tools, 1)),
    *((several, 2), (bad, 3), (oversized, 1), (beside, 2), (leaves_stream, 3), (leaves_early, 3)),
)
"""Each with its share."""
