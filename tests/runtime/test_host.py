"""Cores and memory, read from drawn machines."""

import os
import time
from pathlib import Path

import pytest

from trtllm_lite.runtime.host import (
    OthersMeter,
    available_memory,
    instruction_set,
    physical_cores,
)


def draw(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cpus() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("the system has no affinities")
    return sorted(os.sched_getaffinity(0))


def siblings(groups: dict[int, str]) -> dict[str, str]:
    folder = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {folder.format(cpu): text for cpu, text in groups.items()}


def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    one_core = dict.fromkeys(cpus(), "0-255")
    assert physical_cores(draw(tmp_path / "one", siblings(one_core))) == 1
    each_its_own = {cpu: str(cpu) for cpu in cpus()}
    assert physical_cores(draw(tmp_path / "all", siblings(each_its_own))) == len(cpus())
    assert physical_cores(tmp_path / "unknown") == len(cpus())


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "90000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_a_cpu_quota_bounds_the_cores(
    tmp_path: Path, files: dict[str, str], quota: int | None
) -> None:
    cores = physical_cores(draw(tmp_path, files))
    assert cores == (len(cpus()) if quota is None else quota)


MEMINFO = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:     700 kB\n"}


def test_memory_is_what_the_system_says_is_available(tmp_path: Path) -> None:
    assert available_memory(draw(tmp_path, MEMINFO)) == 700 * 1024


def test_the_tightest_group_limit_wins(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max",
        "sys/fs/cgroup/job/step/memory.current": "1000",
        "sys/fs/cgroup/job/memory.max": "400000",
        "sys/fs/cgroup/job/memory.current": "300000",
        "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 20000\n",
    }
    assert available_memory(draw(tmp_path, {**MEMINFO, **files})) == 120000


def test_the_older_control_groups_are_read_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "7000",
    }
    assert available_memory(draw(tmp_path, {**MEMINFO, **files})) == 0


def test_a_group_path_never_leaves_the_tree(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../up\n",
        "sys/fs/cgroup/cgroup.procs": "1",
        "sys/up/memory.max": "1",
        "sys/up/memory.current": "0",
    }
    assert available_memory(draw(tmp_path, {**MEMINFO, **files})) == 700 * 1024


def test_this_machine_has_cores_and_memory(tmp_path: Path) -> None:
    assert physical_cores() >= 1
    assert (available_memory() or 1) > 0
    assert (available_memory(tmp_path) or 1) > 0


def test_the_instruction_set_is_the_first_processors(tmp_path: Path) -> None:
    x86 = "processor : 0\nflags\t\t: sse avx2 avx\n\nprocessor : 1\nflags : sse\n"
    first = instruction_set(draw(tmp_path / "x86", {"proc/cpuinfo": x86}))
    assert first.split()[1:] == ["avx", "avx2", "sse"]
    arm = instruction_set(draw(tmp_path / "arm", {"proc/cpuinfo": "Features : fp asimd\n"}))
    assert arm.split()[1:] == ["asimd", "fp"]
    assert instruction_set(tmp_path / "unknown")


def stat_text(busy: int, idle: int) -> dict[str, str]:
    """Ticks of all processors alike: half of `busy` for the user, the rest stolen."""
    fields = [busy // 2, 0, 0, idle // 2, idle // 2, 0, 0, busy // 2, 0, 0]
    lines = [f"cpu{n} {' '.join(map(str, fields))}" for n in (*cpus(), 9999)]
    return {"proc/stat": "\n".join(["cpu 1 2 3 4 5 6 7 8", *lines, "intr 5"])}


def test_the_others_share_is_what_is_busy_and_not_ours(tmp_path: Path) -> None:
    meter = OthersMeter(draw(tmp_path, stat_text(0, 2)))
    draw(tmp_path, stat_text(60_000, 20_002))
    first = meter.fraction()
    assert first == pytest.approx(0.75, abs=0.01)
    draw(tmp_path, stat_text(60_000, 90_002))
    assert meter.fraction() == pytest.approx(0, abs=0.01)
    assert meter.fraction() is None
    assert OthersMeter(tmp_path / "unknown").fraction() is None


def test_our_own_work_is_not_the_others(tmp_path: Path) -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    meter = OthersMeter(draw(tmp_path, stat_text(0, 2)))
    start = time.process_time()
    while (own := time.process_time() - start) < 0.2:
        pass
    ticks = max(2, round(own * hertz / len(cpus())) // 2 * 2)
    draw(tmp_path, stat_text(ticks, 2))
    assert (meter.fraction() or 0) < 0.2
