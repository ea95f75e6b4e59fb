"""What this process may use of its machine: physical cores and memory, container limits included.

Every function takes the root of the file system, so that tests can hand it a drawn machine.
"""

import os
from pathlib import Path

ROOT = Path("/")


def physical_cores(root: Path = ROOT) -> int:
    """Cores that this process may run on: hyper-threads counted once, the CPU quota of a Linux
    control group respected. At least 1."""
    cores = _distinct_cores(root)
    quota = _cpu_quota(root)
    return max(1, cores if quota is None else min(cores, quota))


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


def _distinct_cores(root: Path) -> int:
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has affinities
        return os.cpu_count() or 1
    siblings = [
        _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        for cpu in cpus
    ]
    return len({names or str(cpu) for cpu, names in zip(cpus, siblings, strict=True)})


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
