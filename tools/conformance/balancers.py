"""`python -m trtllm_lite.tools.conformance.balancers BUNDLE --nginx PROGRAM`: two plain servers of
a real bundle behind a balancer that already exists, and what clients see when one of them is killed
or drains. For nginx (with docs/deploy/nginx.conf) and vllm-router. Needs httpx."""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from trtllm_lite.tools.conformance.fleet_clients import (
    ABORTED,
    FINISHED,
    SLOTS,
    Timed,
    event_times,
    leave,
    samples,
    short,
    stream_end,
    texts_agree,
)
from trtllm_lite.tools.conformance.processes import start_server, url_of
from trtllm_lite.tools.module_program import run_module

CONFIGURATION = Path(__file__).resolve().parents[2] / "docs" / "deploy" / "nginx.conf"
START_SECONDS = 120.0
NGINX_FOLDERS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
RETRIES = 2
"""As OpenAI's clients do by default."""

Process = subprocess.Popen[str]


@dataclass(frozen=True)
class Findings:
    """Times in seconds. Of each of the two ends of a server, by kill -9 and by SIGTERM: what became
    of the streams that ran (cut, answered, silent), and of the short requests that came after it:
    how many failed after `RETRIES` retries, how many needed one, the slowest."""

    balancer: str
    shares: tuple[int, ...]
    first_event: float
    last_event: float
    freed_after_leaving: float
    killed: dict[str, Any]
    drained: dict[str, Any]

    def problems(self) -> list[str]:
        """What must not be."""
        wrong = {
            "a server served nothing": min(self.shares) == 0,
            "the stream came in one piece": self.last_event < 1.5 * self.first_event,
            "a slot was held after its client left": self.freed_after_leaving > 2,
            "a client was left without an end": self.killed["silent"] + self.drained["silent"] > 0,
            "a request failed after a kill": self.killed["failed"] > 0,
            "a request failed during a drain": self.drained["failed"] > 0,
            "a stream was cut by a drain": self.drained["cut"] > 0,
        }
        return [text for text, is_so in wrong.items() if is_so]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--nginx", help="The program nginx.")
@click.option("--vllm-router", help="The program vllm-router.")
@click.option("--port", default=18210, show_default=True, help="The first of five ports to use.")
def cli(bundle: Path, nginx: str | None, vllm_router: str | None, port: int) -> None:
    """Put two servers of BUNDLE behind each balancer that is named, end one server after another,
    and tell what clients saw, as JSON. Exits with 1 when something was not as it must be."""
    problems = []
    for name, program, start in (
        ("nginx", nginx, start_nginx),
        ("vllm-router", vllm_router, start_router),
    ):
        if program is not None:
            findings = asyncio.run(found(bundle, name, program, start, port))
            click.echo(json.dumps(asdict(findings), indent=2))
            problems += findings.problems()
    for text in problems:
        click.echo(f"FAILED: {text}", err=True)
    sys.exit(1 if problems else 0)


def start_nginx(program: str, folder: Path, port: int, servers: Sequence[int]) -> Process:
    """With the configuration of the documentation, on other ports."""
    text = CONFIGURATION.read_text()
    for written, real in zip((8000, 8001, 8002), (port, *servers), strict=True):
        text = text.replace(f":{written}", f":{real}")
    places = " ".join(f"{name}_temp_path {folder}/{name};" for name in NGINX_FOLDERS)
    text = text.replace("access_log off;", f"access_log off; {places}")
    (folder / "nginx.conf").write_text(text)
    told = f"daemon off; pid {folder}/pid; error_log stderr;"
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", told]
    return subprocess.Popen(command, text=True)


def start_router(program: str, folder: Path, port: int, servers: Sequence[int]) -> Process:
    """As the documentation has it."""
    urls = [f"http://127.0.0.1:{each}" for each in servers]
    place = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 4)]
    health = ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"]
    command = [program, *place, *health, "--policy", "round_robin", "--worker-urls", *urls]
    return subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL)


async def found(
    bundle: Path, name: str, program: str, start: Callable[..., Process], port: int
) -> Findings:
    """Everything, once."""
    ports = (port + 1, port + 2)
    servers = [start_server(bundle, "--port", str(each)) for each in ports]
    balancer: Process | None = None
    try:
        for server in servers:
            await asyncio.wait_for(asyncio.to_thread(url_of, server), START_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            balancer = start(program, Path(folder), port, ports)
            base = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=base, timeout=120) as client:
                await _until_up(client)
                facts = await _sound(client, ports)
                facts["killed"] = await _ended(client, servers[0], signal.SIGKILL)
                servers[0] = start_server(bundle, "--port", str(ports[0]))
                await asyncio.wait_for(asyncio.to_thread(url_of, servers[0]), START_SECONDS)
                await _until_both_serve(client, ports)
                facts["drained"] = await _ended(client, servers[1], signal.SIGTERM)
    finally:
        for process in (*servers, balancer):
            if process is not None:
                process.terminate()
                process.wait(30)
    return Findings(balancer=name, **facts)


async def _until_up(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_SECONDS):
        while (await short(client, retries=0)).status != 200:
            await asyncio.sleep(0.2)


async def _until_both_serve(client: httpx.AsyncClient, ports: Sequence[int]) -> None:
    """The balancer may take a while to trust a server again."""
    before = [await _sum(port, FINISHED) for port in ports]
    async with asyncio.timeout(START_SECONDS):
        while any([await _sum(p, FINISHED) <= n for p, n in zip(ports, before, strict=True)]):
            await asyncio.gather(*(short(client, retries=0) for _ in range(4)))


async def _sound(client: httpx.AsyncClient, ports: Sequence[int]) -> dict[str, Any]:
    await texts_agree(client, 16)
    shares = [await _sum(port, FINISHED) for port in ports]
    times = await event_times(client)
    before = await _sums(ports, ABORTED)
    await leave(client)
    start = time.monotonic()
    while await _sums(ports, ABORTED) == before or await _sums(ports, SLOTS):
        await asyncio.sleep(0.02)
    return {
        "shares": tuple(map(int, shares)),
        "first_event": round(times[0], 3),
        "last_event": round(times[-1], 3),
        "freed_after_leaving": round(time.monotonic() - start, 3),
    }


async def _ended(client: httpx.AsyncClient, server: Process, how: signal.Signals) -> dict[str, Any]:
    streams = [asyncio.ensure_future(stream_end(client)) for _ in range(6)]
    await asyncio.sleep(1)
    server.send_signal(how)
    after: list[Timed] = []
    for _ in range(5):
        after += await asyncio.gather(*(short(client, RETRIES) for _ in range(4)))
    ends = await asyncio.gather(*streams)
    return {
        **{end: ends.count(end) for end in ("cut", "answered", "silent")},
        "after": len(after),
        "failed": sum(each.status != 200 for each in after),
        "retried": sum(each.tries > 1 for each in after),
        "slowest": round(max(each.seconds for each in after), 3),
    }


async def _sums(ports: Sequence[int], metric: str) -> float:
    return sum([await _sum(port, metric) for port in ports])


async def _sum(port: int, metric: str) -> float:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        return sum((await samples(client, metric)).values())


if __name__ == "__main__":
    run_module(cli, "trtllm_lite.tools.conformance.balancers")
