"""Cores and memory, read from drawn machines."""

import os
from pathlib import Path

import pytest

from trtllm_lite.runtime.host import available_memory, physical_cores


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
