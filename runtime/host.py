"""What this process may use of its machine: physical cores and memory, container limits included.

Every function takes the root of the file system, so that tests can hand it a drawn machine.
"""

import os
import platform
import time
from pathlib import Path

ROOT = Path("/")


def physical_cores(root: Path = ROOT) -> int:
    """Cores that this process may run on: hyper-threads counted once, the CPU quota of a Linux
    control group respected. At least 1."""
    cores = _distinct_cores(root)
    quota = _cpu_quota(root)
    return max(1, cores if quota is None else min(cores, quota))


def instruction_set(root: Path = ROOT) -> str:
    """The machine's architecture and the extensions of its first processor, as the system lists
    them: what decides which machine code a library chooses. Sorted words."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join([platform.machine(), *sorted(set(value.split()))])
    return f"{platform.machine()} {platform.processor()}".strip()


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that can still be taken without swapping, the limit of a Linux control group
    respected; None where the system does not say."""
    known = [x for x in (_meminfo_available(root), *_group_available(root)) if x is not None]
    if known:
        return max(0, min(known))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


class OthersMeter:
    """How busy other processes keep the processors that this process may use. Linux only."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._last = self._read()

    def fraction(self) -> float | None:
        """The part of the processors' time, from 0 to 1, that went to others since the last call
        (at first: since this object was made); None where the system does not say."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None or self._last[1] <= before[1]:
            return None
        busy, total, own = (b - a for a, b in zip(before, self._last, strict=True))
        return min(1.0, max(0.0, (busy - own) / total))

    def _read(self) -> tuple[float, float, float] | None:
        """Seconds: busy and total time of the allowed processors, and our own."""
        allowed = {f"cpu{cpu}" for cpu in _allowed_cpus() or ()}
        busy = total = 0.0
        for line in (_read(self._root / "proc/stat") or "").splitlines():
            name, *fields = line.split()
            if name in allowed and len(fields) >= 8 and all(f.isdigit() for f in fields[:8]):
                ticks = [int(field) for field in fields[:8]]
                total += sum(ticks)
                busy += sum(ticks) - ticks[3] - ticks[4]  # idle, and idle while waiting for disks
        hertz = os.sysconf("SC_CLK_TCK") if total else 1
        return (busy / hertz, total / hertz, time.process_time()) if total else None


def _distinct_cores(root: Path) -> int:
    cpus = _allowed_cpus()
    if cpus is None:
        return os.cpu_count() or 1
    siblings = [
        _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        for cpu in cpus
    ]
    return len({names or str(cpu) for cpu, names in zip(cpus, siblings, strict=True)})


def _allowed_cpus() -> list[int] | None:
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has affinities
        return None


def _cpu_quota(root: Path) -> int | None:
    """Whole CPUs of the tightest quota, rounded up; None without one."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        unified = (_read(folder / "cpu.max") or "").split()
        v1 = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        quota, period = unified if len(unified) == 2 else v1
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(-(-int(quota) // int(period)))
    return min(quotas, default=None)


def _meminfo_available(root: Path) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split()[:1] and rest.split()[0].isdigit():
            return int(rest.split()[0]) * 1024
    return None


def _group_available(root: Path) -> list[int]:
    """What is left under each memory limit on the way up from this process's control group."""
    left = []
    for folder in _group_folders(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(folder / limit_name) or "", _read(folder / used_name) or ""
            if limit.isdigit() and used.isdigit():
                left.append(int(limit) - int(used) + _reclaimable(folder))
    return left


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache that the kernel drops before it refuses memory."""
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _group_folders(root: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and its parents, for both versions."""
    folders = []
    base = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy != "0" and controller not in controllers.split(","):
            continue
        mount = base if hierarchy == "0" else base / controller
        relative = Path(path.lstrip("/"))
        folders += [mount / p for p in (relative, *relative.parents) if ".." not in p.parts]
    return folders


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
