"""The quiet gate: how much of the CPUs did others use while something was measured?"""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuReading:
    """CPU seconds since the machine and the processes started. Source: proc(5).

    total: every state of all CPUs; idle: of it, idle and waiting for a disk; steal: of it, taken
    by other virtual machines; ours: used by the measured processes.
    """

    total: float
    idle: float
    steal: float
    ours: float


@dataclass(frozen=True)
class Noise:
    """Shares of all CPUs between two readings: used by other processes, and stolen from this
    machine."""

    others: float
    steal: float

    def quiet(self, limit: float) -> bool:
        return self.others + self.steal <= limit


def read_cpu(pids: tuple[int, ...], proc: Path = Path("/proc")) -> CpuReading:
    """A reading in which `pids` are the measured processes."""
    fields = [int(x) for x in (proc / "stat").read_text().splitlines()[0].split()[1:9]]
    ours = sum(_ticks_of(proc / str(pid) / "stat") for pid in pids)
    parts = (sum(fields), fields[3] + fields[4], fields[7], ours)
    return CpuReading(*(part / TICKS for part in parts))


def _ticks_of(path: Path) -> int:
    """User and system ticks of a process. Its name, in brackets, may hold blanks."""
    fields = path.read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def noise_between(before: CpuReading, after: CpuReading) -> Noise:
    """Zero where too little time has passed for the kernel's clock to tell."""
    total = after.total - before.total
    if total <= 0:
        return Noise(0.0, 0.0)
    idle, steal = after.idle - before.idle, after.steal - before.steal
    others = total - idle - steal - (after.ours - before.ours)
    return Noise(max(0.0, others / total), max(0.0, steal / total))
