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


def test_the_mean_counts_slow_reads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with bandwidth.MemoryReader(2, 2**16) as reader:
        for measure, expected in ((reader.rate, 2**16 / 1.0), (reader.mean_rate, 2 * 2**16 / 4.0)):
            ticks = iter((0.0, 1.0, 10.0, 13.0))
            monkeypatch.setattr("time.perf_counter", lambda ticks=ticks: next(ticks))
            assert measure(2) == expected


def test_the_mean_is_not_measured_where_memory_is_short() -> None:
    assert bandwidth.typical_bandwidth(1, available=2**30 - 1) is None


def test_fewer_threads_have_their_share_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(bandwidth, "physical_cores", lambda: 4)
    assert bandwidth.product_rate(4) == 2 * 1024**3
    assert bandwidth.product_rate(8) == 2 * 1024**3
    assert bandwidth.product_rate(1) == 2 * 1024**3 / 4
