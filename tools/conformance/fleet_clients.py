"""Clients of several servers behind one address, and what became of their requests."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

PATH = "/v1/completions"
BODY = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
FINISHED = "trtllm_lite_requests_finished_total"
ABORTED = "trtllm_lite_requests_aborted_total"
SLOTS = "trtllm_lite_kv_slots_used"

End = Literal["answered", "cut", "silent"]
"""A whole answer; an error that the client sees; or neither of them."""


@dataclass(frozen=True)
class Timed:
    """One short request: its status after `tries`, and the seconds that it took."""

    status: int
    tries: int
    seconds: float


async def stream_end(client: httpx.AsyncClient) -> End:
    """Run a long stream to its end."""
    last = ""
    try:
        async with client.stream("POST", PATH, json={**BODY, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                last = line or last
    except httpx.TimeoutException:
        return "silent"
    except httpx.HTTPError:
        return "cut"
    if last == "data: [DONE]":
        return "answered"
    return "cut" if '"error"' in last else "silent"


async def whole_end(client: httpx.AsyncClient) -> End:
    """Run a long request that does not stream."""
    try:
        answer = await client.post(PATH, json=BODY)
    except httpx.TimeoutException:
        return "silent"
    except httpx.HTTPError:
        return "cut"
    return "answered" if answer.status_code == 200 else "cut"


async def short(client: httpx.AsyncClient, retries: int) -> Timed:
    """Four tokens; tried again after what clients of OpenAI try again after: a connection that
    breaks, or 5xx."""
    start = time.monotonic()
    status = 0
    for attempt in range(1, retries + 2):
        try:
            answer = await client.post(PATH, json={**BODY, "max_tokens": 4})
            status = answer.status_code
        except httpx.TransportError:
            status = 0
        if status == 200 or attempt > retries:
            break
        await asyncio.sleep(0.5)
    return Timed(status, attempt, time.monotonic() - start)


async def event_times(client: httpx.AsyncClient) -> Sequence[float]:
    """Seconds from a request to each of its events."""
    start, times = time.monotonic(), []
    async with client.stream("POST", PATH, json={**BODY, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic() - start)
    return times


async def leave(client: httpx.AsyncClient) -> None:
    """Begin a long stream and close it after the first event."""
    async with client.stream("POST", PATH, json={**BODY, "stream": True}) as answer:
        await anext(answer.aiter_lines())


async def samples(client: httpx.AsyncClient, metric: str) -> dict[str, float]:
    """A metric's value for each set of labels."""
    found: dict[str, float] = {}
    for line in (await client.get("/metrics")).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] == metric:
            found[name] = float(value)
    return found


async def texts_agree(client: httpx.AsyncClient, count: int) -> Any:
    """The one text that `count` equal requests at the same time give. Raises ValueError."""
    body = {**BODY, "max_tokens": 16}
    answers = await asyncio.gather(*(client.post(PATH, json=body) for _ in range(count)))
    texts = {answer.json()["choices"][0]["text"] for answer in answers}
    if len(texts) != 1:
        raise ValueError(f"equal greedy requests gave {sorted(texts)}")
    return texts.pop()
