"""How fast memory is read, by a clock that ticks once a look."""

import pytest

from trtllm_lite.tools import bandwidth


@pytest.mark.parametrize("threads", [1, 2])
def test_bandwidth_counts_every_byte_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    assert bandwidth.measure(threads, 2**20, passes=3) == 2**20


def test_bandwidth_is_not_measured_where_memory_is_short() -> None:
    assert bandwidth.read_bandwidth(1, available=2**30 - 1) is None


def test_a_reader_measures_more_than_once() -> None:
    with bandwidth.MemoryReader(2, 2**16) as reader:
        assert all(reader.rate(1) > 0 for _ in range(3))
