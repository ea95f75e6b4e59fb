"""bench: what it says about the machine and the checkout, and how figures are put together."""

import subprocess
from pathlib import Path
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.tools import bench_report
from trtllm_lite.tools.bench_breakdown import spread


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_spread_is_median_least_and_greatest(values: list[float]) -> None:
    found = spread(iter(values))
    assert found == {
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def test_the_cpu_is_named_from_the_first_line_that_does(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name : Other\n")
    assert bench_report.machine(file)["cpu"] == "Some CPU @ 2 GHz"
    assert bench_report.machine(tmp_path / "missing")["cpu"]


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    assert bench_report.commit(tmp_path) is None
    for command in (
        ["init", "-q"],
        [
            *("-c", "user.name=n", "-c", "user.email=e"),
            *("commit", "-q", "--allow-empty", "-m", "m"),
        ],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    head = subprocess.run(
        ["git", "-C", str(tmp_path), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert bench_report.commit(tmp_path) == head
    (tmp_path / "file").write_text("x")
    subprocess.run(["git", "-C", str(tmp_path), "add", "file"], check=True)
    assert bench_report.commit(tmp_path) == f"{head}-dirty"
