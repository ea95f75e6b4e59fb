"""How many rows a decode run gets, and which recordings are kept."""

import logging
from functools import partial

import pytest

from trtllm_lite.runtime.backends.device import DeviceError
from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.recorded_runs import (
    MAX_RECORDED,
    RecordedRuns,
    bucket,
    rows_to_run,
)


def test_few_rows_run_as_they_are_and_more_in_steps_of_eight() -> None:
    assert [bucket(n, 64) for n in (1, 7, 8, 9, 16, 17, 64)] == [1, 7, 8, 16, 16, 24, 64]
    assert [bucket(n, 13) for n in (9, 13)] == [13, 13]
    assert bucket(20, 13) == 20


def test_spare_rows_go_to_slots_that_hold_nothing() -> None:
    assert rows_to_run(11, 32, set(range(11))) == 16
    assert rows_to_run(11, 32, {*range(11), 16, 20}) == 16
    assert rows_to_run(11, 32, {*range(11), 15}) == 11
    assert rows_to_run(5, 32, {5, 6}) == 5


def test_the_least_recently_used_recording_gives_way() -> None:
    device, done = FakeDevice(), list[int]()
    runs = RecordedRuns(device)
    for rows in range(MAX_RECORDED):
        runs.record(rows, partial(device.queue, partial(done.append, rows)))
    assert runs.launch(0)
    runs.record(999, lambda: device.queue(lambda: done.append(999)))
    assert [runs.has(n) for n in (0, 1, 2, 999)] == [True, False, True, True]
    assert not runs.launch(1)
    assert runs.launch(999)
    assert done == []
    device.synchronize()
    assert done == [0, 999]
    runs.clear()
    assert not runs.launch(999)


def test_what_is_not_wanted_or_not_possible_is_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device, tried = FakeDevice(), list[int]()

    def work() -> None:
        tried.append(1)
        raise DeviceError("no")

    unwanted = RecordedRuns(device, wanted=False)
    unwanted.record(1, work)
    assert (tried, unwanted.has(1)) == ([], False)
    broken = RecordedRuns(device)
    with caplog.at_level(logging.WARNING):
        broken.record(1, work)
        broken.record(2, work)
    assert (tried, broken.has(1)) == ([1], False)
    assert [r.getMessage() for r in caplog.records] == ["decode runs without CUDA graphs: no"]
