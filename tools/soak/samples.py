"""What one process holds, sampled over time: memory, descriptors, threads, children."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """seconds: since sampling began. rss: bytes, of the process alone. children: processes."""

    seconds: float
    rss: int
    descriptors: int
    threads: int
    children: int


def sample(pid: int, began: float) -> Sample:
    """Now. Raises OSError when the process is gone."""
    folder = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Sample(
        seconds=time.monotonic() - began,
        rss=int(status["VmRSS"].split()[0]) * 1024,
        descriptors=sum(1 for _ in (folder / "fd").iterdir()),
        threads=int(status["Threads"]),
        children=len(children_of(pid)),
    )


def children_of(pid: int) -> list[int]:
    """Processes that this one has started and that still are there."""
    tasks = (Path("/proc") / str(pid) / "task").iterdir()
    found: list[int] = []
    for task in tasks:
        try:
            found += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue  # the thread has ended meanwhile
    return found


def is_running(pid: int) -> bool:
    """Not gone, and not only waited for."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def megabytes_a_minute(samples: Sequence[Sample]) -> float:
    """The slope of the memory: least squares over all samples. 0 for fewer than two."""
    count = len(samples)
    times = [each.seconds / 60 for each in samples]
    sizes = [each.rss / 1e6 for each in samples]
    if count < 2 or times[0] == times[-1]:
        return 0.0
    time_mean, size_mean = sum(times) / count, sum(sizes) / count
    spread = sum((t - time_mean) ** 2 for t in times)
    shared = sum((t - time_mean) * (s - size_mean) for t, s in zip(times, sizes, strict=True))
    return shared / spread


class Sampler:
    """Samples a process every so many seconds, the first time after `settle`, until it is
    cancelled."""

    def __init__(self, pid: int, seconds: float, settle: float) -> None:
        self.samples: list[Sample] = []
        self._pid = pid
        self._seconds = seconds
        self._settle = settle

    async def run(self) -> None:
        """Raises OSError when the process is gone."""
        began = time.monotonic()
        await asyncio.sleep(self._settle)
        while True:
            self.samples.append(sample(self._pid, began))
            await asyncio.sleep(self._seconds)
