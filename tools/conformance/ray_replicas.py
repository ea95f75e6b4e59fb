"""`python -m trtllm_lite.tools.conformance.ray_replicas BUNDLE`: two replicas of a bundle under
Ray Serve, and what clients see when one of them is killed. Needs the extra [ray], and httpx."""

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from trtllm_lite.tools.conformance.fleet_clients import (
    ABORTED,
    FINISHED,
    SLOTS,
    event_times,
    leave,
    samples,
    short,
    stream_end,
    texts_agree,
    whole_end,
)
from trtllm_lite.tools.conformance.processes import (
    descendants,
    reachable,
    start_server,
    title,
    url_of,
)
from trtllm_lite.tools.module_program import run_module

START_SECONDS = 300.0
END_SECONDS = 60.0
REPLICA = "ray::ServeReplica"
"""How Ray titles the process of a replica."""
STREAMS, WHOLE, AFTER = 6, 4, 8
TOLD_SECONDS = 3.0
"""Until the front knows the replicas' numbers."""


@dataclass(frozen=True)
class Findings:
    """Times in seconds.

    shares: requests that each replica finished, of 32. cut, answered, silent: of the requests that
    ran when a replica was killed, those whose client saw an error, a whole answer, neither.
    refused_after, slowest_after: of the requests sent right after the kill, without any retry.
    reachable: sockets of any of its processes that other machines reach. left_behind: processes
    that outlived the server.
    """

    to_ready: float
    shares: tuple[int, ...]
    first_event: float
    last_event: float
    freed_after_leaving: float
    cut: int
    answered: int
    silent: int
    refused_after: int
    slowest_after: float
    replica_back: float
    reachable: tuple[str, ...]
    exit_code: int
    left_behind: int

    def problems(self) -> list[str]:
        """What must not be."""
        wrong = {
            "a replica served nothing": len(self.shares) != 2 or min(self.shares) == 0,
            "the stream came in one piece": self.last_event < 1.5 * self.first_event,
            "a slot was held after its client left": self.freed_after_leaving > 2,
            "no stream was on the killed replica": self.cut == 0,
            "a client was left without an end": self.silent > 0,
            "a new request was refused": self.refused_after > 0,
            "other machines reach a socket": bool(self.reachable),
            "the server did not end well": self.exit_code != 0,
            "processes stayed": self.left_behind > 0,
        }
        return [text for text, is_so in wrong.items() if is_so]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
def cli(bundle: Path) -> None:
    """Serve BUNDLE with two replicas, kill one, and tell what clients saw, as JSON. Exits with 1
    when something was not as it must be."""
    findings = asyncio.run(found(bundle))
    click.echo(json.dumps(asdict(findings), indent=2))
    problems = findings.problems()
    for text in problems:
        click.echo(f"FAILED: {text}", err=True)
    sys.exit(1 if problems else 0)


async def found(bundle: Path) -> Findings:
    """Everything, once."""
    facts: dict[str, Any] = {}
    start = time.monotonic()
    process = start_server(bundle, "--replicas", "2", "--port", "0")
    try:
        url = await asyncio.wait_for(asyncio.to_thread(url_of, process), START_SECONDS)
        facts["to_ready"] = time.monotonic() - start
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            facts |= await _both_serve(client)
            facts |= await _stream(client)
            facts |= await _left(client)
            facts |= await _one_killed(client, process.pid)
        children = descendants(process.pid)
        facts["reachable"] = tuple(reachable([process.pid, *children]))
        process.send_signal(signal.SIGTERM)
        facts["exit_code"] = await asyncio.to_thread(process.wait, END_SECONDS)
        await asyncio.sleep(2)
        facts["left_behind"] = sum(title(pid) != "" for pid in children)
    finally:
        process.kill()
    rounded: dict[str, Any] = {k: _rounded(v) for k, v in facts.items()}
    return Findings(**rounded)


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


async def _both_serve(client: httpx.AsyncClient) -> dict[str, Any]:
    await texts_agree(client, 16)
    await texts_agree(client, 16)
    await asyncio.sleep(TOLD_SECONDS)
    counts = await samples(client, FINISHED)
    return {"shares": tuple(int(n) for name, n in sorted(counts.items()) if "front" not in name)}


async def _stream(client: httpx.AsyncClient) -> dict[str, Any]:
    times = await event_times(client)
    return {"first_event": times[0], "last_event": times[-1]}


async def _left(client: httpx.AsyncClient) -> dict[str, Any]:
    before = await _sum(client, ABORTED)
    await leave(client)
    start = time.monotonic()
    while await _sum(client, ABORTED) == before or await _sum(client, SLOTS):
        await asyncio.sleep(0.02)
    return {"freed_after_leaving": time.monotonic() - start}


async def _sum(client: httpx.AsyncClient, metric: str) -> float:
    return sum((await samples(client, metric)).values())


async def _one_killed(client: httpx.AsyncClient, server: int) -> dict[str, Any]:
    streams = [asyncio.ensure_future(stream_end(client)) for _ in range(STREAMS)]
    whole = [asyncio.ensure_future(whole_end(client)) for _ in range(WHOLE)]
    await asyncio.sleep(1)
    victim = _replicas(server)[0]
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    after = await asyncio.gather(*(short(client, retries=0) for _ in range(AFTER)))
    ends = await asyncio.gather(*streams, *whole)
    while not await _two_again(client, server, victim):
        await asyncio.sleep(0.2)
    return {
        "cut": ends.count("cut"),
        "answered": ends.count("answered"),
        "silent": ends.count("silent"),
        "refused_after": sum(each.status != 200 for each in after),
        "slowest_after": max(each.seconds for each in after),
        "replica_back": time.monotonic() - start,
    }


async def _two_again(client: httpx.AsyncClient, server: int, victim: int) -> bool:
    now = _replicas(server)
    running = (await samples(client, "trtllm_lite_replicas_running")).values()
    return victim not in now and len(now) >= 2 and sum(running) >= 2


def _replicas(server: int) -> list[int]:
    return [pid for pid in descendants(server) if title(pid).startswith(REPLICA)]


if __name__ == "__main__":
    run_module(cli, "trtllm_lite.tools.conformance.ray_replicas")
