"""The course of a soak: fill, warm up, load, and look at what is left."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.tools.soak.client import Client
from trtllm_lite.tools.soak.cycles import left_behind
from trtllm_lite.tools.soak.phases import Cancellations, crowd, fill_prefixes, short_requests
from trtllm_lite.tools.soak.samples import Sample, Sampler, sample
from trtllm_lite.tools.soak.server_process import ServerProcess
from trtllm_lite.tools.soak.sizes import Sizes
from trtllm_lite.tools.soak.verdict import Findings

SAMPLE_SECONDS = 5.0
WARM_UP_SHARE = 0.2
MAX_WARM_UP_SECONDS = 180.0
SETTLE_SHARE = 0.05
"""Of the load that is measured, until everybody is inside again."""
IDLE_SECONDS = 3.0
"""After the last client has left: connections close."""
MAX_SLOTS = 8
LOAD = "trtllm_lite.tools.soak.load"
Echo = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """minutes: of the mixed load. short, schemas: requests of the two measured runs. cancels:
    measured clients that leave, in each state. cycles: of an export and a server."""

    minutes: float
    workers: int
    short: int
    schemas: int
    cancels: int
    cycles: int
    seed: int = 0


async def soak(bundle: Path, plan: Plan, folder: Path, log: Path, echo: Echo) -> Findings:
    """Run it against a server of its own. `folder` is for temporary files. Raises TrtllmLiteError
    when the server does not start, or is gone in the middle."""
    temporary = folder / "tmp"
    temporary.mkdir()
    slots = min(MAX_SLOTS, read_manifest(bundle).limits.max_num_seqs)
    server = ServerProcess(bundle, temporary, log, ("--max-num-seqs", str(slots)))
    try:
        parts = await _Course(server, plan, slots, echo).run()
    except (OSError, TimeoutError, httpx.HTTPError) as error:
        raise TrtllmLiteError(f"the server does not answer any more: {error!r}") from error
    finally:
        ending = server.stop()
    left = left_behind(folder / "cycles", plan.cycles, echo)
    return Findings(**parts, ending=ending, left_behind=left)


class _Course:
    """Everything between the start of the server and its end."""

    def __init__(self, server: ServerProcess, plan: Plan, slots: int, echo: Echo) -> None:
        self._server = server
        self._plan = plan
        self._slots = slots
        self._echo = echo

    async def run(self) -> dict[str, Any]:
        """The fields of `Findings`, without the ending."""
        async with Client(self._server.url) as client:
            sizes = Sizes.of(await client.room())
            golden = [await client.golden()]
            held = await fill_prefixes(client, sizes)
            self._echo(f"{held / 2**20:.0f} MiB of prefixes fill their store")
            loaded = await self._loaded(client)
            golden.append(await client.golden())
            measured = await self._measured(client, sizes)
            golden.append(await client.golden())
            await client.until_idle()
            numbers = await client.numbers()
        plan = {"minutes": self._plan.minutes, "workers": self._plan.workers}
        return {**plan, **loaded, **measured, "golden": golden, "numbers": numbers}

    async def _loaded(self, client: Client) -> dict[str, Any]:
        seconds = self._plan.minutes * 60
        warm_up = min(MAX_WARM_UP_SECONDS, seconds * WARM_UP_SHARE)
        await self._load(warm_up)
        before = await self._quiet(client)
        scrapes: list[float] = []
        async with (
            _sampled(self._server.pid, seconds) as samples,
            _beside(_scraped(client, scrapes)),
        ):
            tally = await self._load(seconds - warm_up)
        after = await self._quiet(client)
        quiet = {"before": before, "after": after}
        return {**quiet, "samples": samples, "scrapes": scrapes, "tally": tally}

    async def _measured(self, client: Client, sizes: Sizes) -> dict[str, Any]:
        plan = self._plan
        made: dict[str, Any] = {}
        self._echo("clients that leave")
        leaving = Cancellations(client, sizes, self._slots)
        made["cancellations"] = await leaving.measured(plan.cancels)
        self._echo("a crowd")
        made["after_crowd"] = await crowd(client, sizes)
        self._echo("short requests")
        made["short"] = await short_requests(client, self._rss, plan.short, schemas=False)
        self._echo("distinct schemas")
        made["schemas"] = await short_requests(client, self._rss, plan.schemas, schemas=True)
        return made

    def _rss(self) -> int:
        return sample(self._server.pid, 0.0).rss

    async def _quiet(self, client: Client) -> Sample:
        """The server with nobody inside."""
        await client.until_idle()
        await asyncio.sleep(IDLE_SECONDS)
        return sample(self._server.pid, time.monotonic())

    async def _load(self, seconds: float) -> dict[str, Any]:
        """The tally of the process that makes the load, whose progress is shown."""
        plan, room = self._plan, await self._room()
        arguments = [self._server.url, seconds, plan.workers, plan.seed, room]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", LOAD, *map(str, arguments)), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        began = time.monotonic()
        told: dict[str, Any] = {}
        async for line in process.stdout:
            told = json.loads(line)
            if not told.get("done"):
                so_far = f"{told['requests']} requests, {told['lost']} lost"
                self._echo(f"{time.monotonic() - began:5.0f} of {seconds:.0f} s: {so_far}")
        await process.wait()
        if not told.get("done"):
            raise TrtllmLiteError("the process that makes the load has died")
        return told

    async def _room(self) -> int:
        async with Client(self._server.url) as client:
            return await client.room()


@asynccontextmanager
async def _sampled(pid: int, seconds: float) -> AsyncIterator[list[Sample]]:
    sampler = Sampler(pid, SAMPLE_SECONDS, seconds * SETTLE_SHARE)
    async with _beside(sampler.run()):
        yield sampler.samples


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` during the block, and no longer."""
    running = asyncio.ensure_future(work)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _scraped(client: Client, seconds: list[float]) -> None:
    """Read /metrics as Prometheus does, and how long it takes."""
    while True:
        began = time.monotonic()
        await client.numbers()
        seconds.append(time.monotonic() - began)
        await asyncio.sleep(SAMPLE_SECONDS)
