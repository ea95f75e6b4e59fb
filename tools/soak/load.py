"""The mixed load, in a process of its own: `python -m trtllm_lite.tools.soak.load`.

Prints a line of JSON every few seconds, and at the end one with `"done": true`.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from trtllm_lite.tools.soak.kinds import KINDS, Kind, Load
from trtllm_lite.tools.soak.sizes import Sizes

REPORT_SECONDS = 5.0
REQUEST_SECONDS = 120.0
KEPT_FAULTS = 10


@dataclass
class Tally:
    """What became of the requests. lost: those that did not get what they had to get."""

    requests: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    faults: list[str] = field(default_factory=list)
    longest: float = 0.0

    def took(self, name: str, seconds: float) -> None:
        self.requests[name] += 1
        self.longest = max(self.longest, seconds)

    def fault(self, name: str, error: Exception) -> None:
        self.lost += 1
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(f"{name}: {type(error).__name__}: {error}"[:300])


async def run(url: str, seconds: float, workers: int, seed: int, sizes: Sizes) -> Tally:
    """Everybody asks, one request after the other, until the time is up."""
    tally, end = Tally(), time.monotonic() + seconds
    telling = asyncio.ensure_future(_tell(tally))
    try:
        tasks = [_work(url, end, random.Random(seed + i), sizes, tally) for i in range(workers)]
        await asyncio.gather(*tasks)
    finally:
        telling.cancel()
    return tally


async def _work(url: str, end: float, chance: random.Random, sizes: Sizes, tally: Tally) -> None:
    kinds, shares = [kind for kind, _ in KINDS], [share for _, share in KINDS]
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS) as http:
        while time.monotonic() < end:
            (kind,) = chance.choices(kinds, shares)
            await _one(kind, Load(http, chance, sizes), tally)


async def _one(kind: Kind, load: Load, tally: Tally) -> None:
    began = time.monotonic()
    name = kind.__name__
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            await kind(load)
    # Whatever a client raises, its request did not get what it had to get.
    except Exception as error:
        tally.fault(name, error)
    tally.took(name, time.monotonic() - began)


async def _tell(tally: Tally) -> None:
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        _print({"requests": tally.requests.total(), "lost": tally.lost})


def _print(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    url, seconds, workers, seed, room = sys.argv[1:]
    sizes = Sizes.of(int(room))
    tally = asyncio.run(run(url, float(seconds), int(workers), int(seed), sizes))
    _print({"done": True, **vars(tally)})


if __name__ == "__main__":
    main()
