"""What is measured before and after the mixed load, while nobody else asks."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx

from trtllm_lite.tools.soak.client import CHAT, Client, conversation
from trtllm_lite.tools.soak.kinds import BUSY
from trtllm_lite.tools.soak.sizes import Sizes

CROWD = 200
CROWD_PATIENCE = 0.5
RETRY_SECONDS = 0.1
AT_ONCE = 4
BLOCKS = 10
MAX_FILL = 64
WORD = "slow "


@dataclass(frozen=True)
class Drift:
    """p99 of the first half of a run of equal requests, and of the second, in seconds: each is the
    median over blocks. grown: bytes of the server's memory over the second half."""

    requests: int
    first: float
    second: float
    grown: int

    @property
    def ratio(self) -> float:
        return self.second / self.first


async def fill_prefixes(client: Client, sizes: Sizes) -> float:
    """Prompts until the store of prefixes takes no more: its growth is no leak. Returns bytes. The
    store of a tiny model is not filled, and not missed."""
    held = -1.0
    for number in range(MAX_FILL):
        words = " ".join(f"{number}.{i}" for i in range(min(100, sizes.long)))
        await client.post(CHAT, conversation(words, max_tokens=1))
        now = (await client.numbers())["prefix_store_bytes"]
        if now <= held:
            break
        held = now
    return held


class Cancellations:
    """Measures the seconds from a client's leaving until nothing of its request is left."""

    def __init__(self, client: Client, sizes: Sizes, slots: int) -> None:
        self._client = client
        self._sizes = sizes
        self._slots = slots
        self._asked = 0

    async def measured(self, count: int) -> dict[str, list[float]]:
        """By the state in which it leaves."""
        return {
            "streaming": [await self._streaming() for _ in range(count)],
            "computing": [await self._computing() for _ in range(count)],
            "waiting": [await self._waiting() for _ in range(count // 4)],
        }

    async def _streaming(self) -> float:
        body = self._endless(self._sizes.short, stream=True)
        async with self._client.http.stream("POST", CHAT, json=body) as answer:
            await anext(answer.aiter_text())
        return await self._client.until_idle()

    async def _computing(self) -> float:
        asking = self._ask(self._endless(self._sizes.long))
        await self._client.until(lambda now: now["requests_running"] > 0)
        await _cancel([asking])
        return await self._client.until_idle()

    async def _waiting(self) -> float:
        """Behind full slots."""
        body = self._endless(self._sizes.short)
        ahead = [self._ask(body) for _ in range(self._slots)]
        try:
            await self._client.until(lambda now: now["requests_running"] == self._slots)
            last = self._ask(body)
            await self._client.until(lambda now: now["requests_waiting"] > 0)
            await _cancel([last])
            return await self._client.until(lambda now: now["requests_waiting"] == 0)
        finally:
            await _cancel(ahead)
            await self._client.until_idle()

    def _endless(self, words: int, **fields: Any) -> dict[str, Any]:
        """Each begins in its own way: none of them finds its prefix computed."""
        self._asked += 1
        text, tokens = f"{self._asked} {WORD * words}", self._sizes.endless
        return conversation(text, max_tokens=tokens, ignore_eos=True, **fields)

    def _ask(self, body: dict[str, Any]) -> "asyncio.Future[httpx.Response]":
        return asyncio.ensure_future(self._client.http.post(CHAT, json=body))


async def _cancel(tasks: Iterable["asyncio.Future[httpx.Response]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def crowd(client: Client, sizes: Sizes) -> float:
    """Many with long answers whose clients lose patience; then the seconds until one more is
    answered, which comes again when the queue is still full of them."""
    body = conversation(WORD, max_tokens=sizes.endless, ignore_eos=True)

    async def impatient() -> None:
        try:
            async with asyncio.timeout(CROWD_PATIENCE):
                await client.http.post(CHAT, json=body)
        except TimeoutError:
            return

    await asyncio.gather(*(impatient() for _ in range(CROWD)))
    began = time.monotonic()
    while True:
        try:
            await client.golden()
            return time.monotonic() - began
        except httpx.HTTPStatusError as error:
            if error.response.status_code != BUSY:
                raise
            await asyncio.sleep(RETRY_SECONDS)


async def short_requests(
    client: Client, rss: Callable[[], int], count: int, *, schemas: bool
) -> Drift:
    """Equal short requests, a few at a time; with `schemas` each is held to one of its own."""
    size, half = count // BLOCKS, BLOCKS // 2
    blocks, middle = [], 0
    for block in range(BLOCKS):
        if block == half:
            middle = rss()
        bodies = [_short(block * size + i, schemas=schemas) for i in range(size)]
        blocks.append(await _p99(client, bodies))
    return Drift(size * BLOCKS, median(blocks[:half]), median(blocks[half:]), rss() - middle)


async def _p99(client: Client, bodies: Sequence[dict[str, Any]]) -> float:
    times: list[float] = []

    async def ask_all(part: Sequence[dict[str, Any]]) -> None:
        for body in part:
            began = time.monotonic()
            await client.post(CHAT, body)
            times.append(time.monotonic() - began)

    await asyncio.gather(*(ask_all(bodies[i::AT_ONCE]) for i in range(AT_ONCE)))
    return sorted(times)[int(0.99 * (len(times) - 1))]


def _short(number: int, *, schemas: bool) -> dict[str, Any]:
    body = conversation("hi", max_tokens=2, temperature=0)
    if schemas:
        name = f"field{number}"
        body["guided_json"] = {"type": "object", "properties": {name: {"type": "integer"}}}
    return body
