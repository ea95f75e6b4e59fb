"""How many rows a decode run gets, and which recordings are kept."""

import gc
import logging
import weakref
from dataclasses import dataclass, field
from functools import partial

import pytest

from trtllm_lite.runtime.backends.device import (
    Device,
    DeviceError,
    DeviceLostError,
    Recorded,
)
from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.recorded_runs import (
    MAX_RECORDED,
    RecordedRuns,
    bucket,
    rows_to_run,
)
from trtllm_lite.runtime.errors import StepError


def test_few_rows_run_as_they_are_and_more_in_steps_of_eight() -> None:
    assert [bucket(n, 64) for n in (1, 7, 8, 9, 16, 17, 64)] == [1, 7, 8, 16, 16, 24, 64]
    assert [bucket(n, 13) for n in (9, 13)] == [13, 13]
    assert bucket(20, 13) == 20


def test_spare_rows_go_to_slots_that_hold_nothing() -> None:
    assert rows_to_run(11, 32, set(range(11))) == 16
    assert rows_to_run(11, 32, {*range(11), 16, 20}) == 16
    assert rows_to_run(11, 32, {*range(11), 15}) == 11
    assert rows_to_run(5, 32, {5, 6}) == 5


@dataclass
class Work:
    """Queues a note of itself, unless it is told not to."""

    device: FakeDevice
    number: int = 0
    done: list[int] = field(default_factory=list)
    refuses: str = ""
    tries: int = 0

    def record(self, device: Device) -> Recorded:
        self.tries += 1
        if self.refuses == "set up":
            raise StepError("no")
        return device.record(self._queue)

    def _queue(self) -> None:
        if self.refuses == "queue":
            raise DeviceError("no")
        self.device.queue(partial(self.done.append, self.number))


def test_the_least_recently_used_recording_gives_way() -> None:
    device, done = FakeDevice(), list[int]()
    runs = RecordedRuns(device)
    for rows in range(MAX_RECORDED):
        runs.record(rows, Work(device, rows, done))
    assert runs.launch(0)
    runs.record(999, Work(device, 999, done))
    assert [runs.has(n) for n in (0, 1, 2, 999)] == [True, False, True, True]
    assert not runs.launch(1)
    assert runs.launch(999)
    assert done == []
    device.synchronize()
    assert done == [0, 999]
    runs.clear()
    assert not runs.launch(999)


def test_what_it_was_recorded_from_lives_as_long_as_the_recording() -> None:
    device = FakeDevice()
    runs, made = RecordedRuns(device), Work(device)
    alive = weakref.ref(made)
    runs.record(1, made)
    del made
    gc.collect()
    assert alive() is not None
    runs.clear()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("refuses", ["set up", "queue"])
def test_what_is_not_wanted_or_not_possible_is_not_tried_again(
    caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    device = FakeDevice()
    work = Work(device, refuses=refuses)
    unwanted = RecordedRuns(device, wanted=False)
    unwanted.record(1, work)
    assert (work.tries, unwanted.has(1), unwanted.works) == (0, False, False)
    broken = RecordedRuns(device)
    with caplog.at_level(logging.WARNING):
        broken.record(1, work)
        broken.record(2, work)
    assert (work.tries, broken.has(1), broken.works) == (1, False, False)
    assert [r.getMessage() for r in caplog.records] == ["decode runs without CUDA graphs: no"]


def test_a_device_that_is_lost_while_recording_is_not_passed_over() -> None:
    device = FakeDevice()
    device.lose("gone")
    with pytest.raises(DeviceLostError, match="gone"):
        RecordedRuns(device).record(1, Work(device))
