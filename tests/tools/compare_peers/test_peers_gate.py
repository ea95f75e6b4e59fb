"""The quiet gate, on readings of a made-up /proc."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.tools.compare_peers.gate import (
    TICKS,
    CpuReading,
    Noise,
    noise_between,
    read_cpu,
)

seconds = st.floats(0, 1e6)


def make_proc(folder: Path, cpu: list[int], processes: dict[int, tuple[int, int]]) -> Path:
    rows = [f"cpu  {' '.join(map(str, cpu))} 0 0", "cpu0 1 1 1 1 1 1 1 1 0 0"]
    (folder / "stat").write_text("\n".join(rows) + "\n")
    for pid, (user, system) in processes.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        line = f"{pid} (a b) c) R 1 1 1 0 -1 4194304 1 0 0 0 {user} {system} 9 9 20 0 1"
        (folder / str(pid) / "stat").write_text(line)
    return folder


def test_a_reading_adds_up(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, [1, 2, 4, 8, 16, 32, 64, 128], {7: (3, 5), 9: (10, 20)})
    reading = read_cpu((7, 9), proc)
    expected = CpuReading(255 / TICKS, (8 + 16) / TICKS, 128 / TICKS, 38 / TICKS)
    assert reading == expected


def test_ones_own_work_is_not_noise(tmp_path: Path) -> None:
    before = read_cpu((7,), make_proc(tmp_path, [100, 0, 0, 100, 0, 0, 0, 0], {7: (50, 0)}))
    after = read_cpu((7,), make_proc(tmp_path, [190, 0, 0, 190, 0, 0, 0, 20], {7: (120, 10)}))
    # 200 ticks passed: 90 idle, 20 stolen, 80 ours, 10 of others.
    noise = noise_between(before, after)
    assert (noise.others, noise.steal) == pytest.approx((10 / 200, 20 / 200))


@given(st.tuples(seconds, seconds, seconds, seconds), st.tuples(seconds, seconds, seconds, seconds))
def test_shares_are_shares(
    before: tuple[float, float, float, float], added: tuple[float, float, float, float]
) -> None:
    idle, steal, ours, others = added
    first = CpuReading(*before)
    second = CpuReading(
        first.total + sum(added), first.idle + idle, first.steal + steal, first.ours + ours
    )
    noise = noise_between(first, second)
    assert 0 <= noise.others <= 1 + 1e-6
    assert 0 <= noise.steal <= 1 + 1e-6
    if sum(added) > 1:
        assert noise.others == pytest.approx(others / sum(added), abs=1e-6)


def test_no_time_is_no_noise() -> None:
    same = CpuReading(5, 1, 1, 1)
    assert noise_between(same, same) == Noise(0, 0)


@pytest.mark.parametrize(("noise", "quiet"), [((0.04, 0.05), True), ((0.06, 0.05), False)])
def test_stolen_and_used_count_alike(noise: tuple[float, float], quiet: bool) -> None:
    assert Noise(*noise).quiet(0.1) is quiet


def test_this_machine_can_be_read() -> None:
    reading = read_cpu((os.getpid(),))
    assert 0 < reading.ours < reading.total
    assert 0 <= reading.idle < reading.total
