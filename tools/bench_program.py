"""What `bench --server` measures of the program as users start it: how soon it is ready, and what
streams cost that only wait."""

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trtllm_lite.runtime.errors import StepError
from trtllm_lite.tools.bench_server_run import PATH, LoadProcess, body

READY_SECONDS = 120.0
PROMPT = "The river"
_SPARE_FILES = 200
"""Descriptors beside those of the streams."""


@dataclass(frozen=True)
class Program:
    """A server that is ready: seconds from its start to the line that says so."""

    pid: int
    host: str
    port: int
    seconds: float


@dataclass(frozen=True)
class Idle:
    """Resident bytes of the server before and while `streams` streams waited."""

    streams: int
    before: int
    during: int

    @property
    def cost(self) -> int:
        return self.during - self.before


@contextmanager
def started(bundle: str, arguments: Sequence[str] = ()) -> Iterator[Program]:
    """`trtllm-lite serve` on a free port, until the end of the block. Raises StepError when it
    does not get ready."""
    command = [sys.executable, "-m", "trtllm_lite", "serve", bundle, "--port", "0", "--quiet"]
    command += ["--log-format", "json", "--progress", "none", *arguments]
    begun = time.perf_counter()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None  # it was asked for
            line = process.stdout.readline()
            if not line:
                raise StepError("the server ended before it was ready: try `trtllm-lite serve`")
            url = urlsplit(json.loads(line)["url"])
            seconds = time.perf_counter() - begun
            yield Program(process.pid, str(url.hostname), url.port or 0, seconds)
        finally:
            process.terminate()
            try:
                process.wait(READY_SECONDS)
            finally:
                process.kill()


def ready_seconds(bundle: str, arguments: Sequence[str], starts: int) -> list[float]:
    """Of so many starts, one after the other."""
    seconds = []
    for _ in range(starts):
        with started(bundle, arguments) as program:
            seconds.append(program.seconds)
    return seconds


def idle_streams(
    bundle: str, arguments: Sequence[str], streams: int, output_len: int
) -> Idle | None:
    """What streams cost that wait: accepted requests in the queue of a server whose one slot is
    busy, each with its status, its headers and a comment that keeps it alive sent. The busy slot
    has been used to its end before, so that its memory is there already. None where the system
    does not tell the memory of a process.

    `output_len`: tokens of the request in the slot; it must outlast the opening of the streams.
    """
    if resident_bytes(1) is None:
        return None
    allow_files(streams + _SPARE_FILES)
    more = ["--max-num-seqs", "1", "--max-queue", str(streams), "--stream-keep-alive", "0.5"]
    with started(bundle, [*arguments, *more]) as program, LoadProcess() as client:
        target = {"host": program.host, "port": program.port, "path": PATH}
        busy = body(PROMPT, output_len)
        client.ask({"do": "load", **target, "bodies": [busy]})
        before = resident_bytes(program.pid)
        waiting = client.ask({"do": "hold", **target, "bodies": [busy] * (streams + 1)})["waiting"]
        during = resident_bytes(program.pid)
        client.ask({"do": "release"})
    if waiting < streams:
        raise StepError(f"only {waiting} of {streams} streams waited: raise --output-len")
    assert before is not None  # it was told a moment ago
    assert during is not None
    return Idle(waiting, before, during)


def allow_files(count: int) -> None:
    """Let this process and its children have so many open files. Raises StepError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        if hard not in (resource.RLIM_INFINITY,) and hard < count:
            raise StepError(f"{count} open files are needed; the system allows {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def resident_bytes(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Memory of a process; None where the system does not tell."""
    try:
        status = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
