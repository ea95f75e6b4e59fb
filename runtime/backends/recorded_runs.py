"""Decode runs recorded as CUDA graphs, one for each number of rows that is run often."""

import logging
from collections import OrderedDict
from collections.abc import Set
from typing import Protocol

from trtllm_lite.runtime.backends.device import (
    Device,
    DeviceError,
    DeviceLostError,
    Recorded,
)
from trtllm_lite.runtime.errors import StepError

EXACT_ROWS = 8
ROW_STEP = 8
MAX_RECORDED = 64

_log = logging.getLogger(__name__)


def bucket(rows: int, most: int) -> int:
    """The number of rows that a run of `rows` is filled up to: small ones are run as they are,
    larger ones as the next multiple of ROW_STEP, but never more than `most`."""
    if rows <= EXACT_ROWS:
        return rows
    return min(-(-rows // ROW_STEP) * ROW_STEP, max(rows, most))


def rows_to_run(rows: int, most: int, occupied: Set[int]) -> int:
    """Rows from slot 0 on to run for the `rows` that are wanted. What is written for the others
    goes to slots that hold nothing; where there are no such slots, it is just `rows`."""
    filled = bucket(rows, most)
    return rows if any(slot in occupied for slot in range(rows, filled)) else filled


class Recordable(Protocol):
    """A run that was set up, and run once."""

    def record(self, device: Device) -> Recorded:
        """Raises StepError, DeviceError."""


class RecordedRuns:
    """The recorded runs of a session by their number of rows.

    A recording holds addresses and shapes, so `clear` has to be called before any of the memory
    changes. It is kept together with what it was recorded from, which nobody may change or drop as
    long as it is launched.
    """

    def __init__(self, device: Device, *, wanted: bool = True) -> None:
        self._device = device
        self._runs: OrderedDict[int, tuple[Recorded, Recordable]] = OrderedDict()
        self.works = wanted
        """Whether `record` is worth a try."""

    def has(self, rows: int) -> bool:
        """Whether `launch` would do."""
        return rows in self._runs

    def launch(self, rows: int) -> bool:
        """Queue the recorded run. False where there is none."""
        if rows not in self._runs:
            return False
        self._runs.move_to_end(rows)
        self._runs[rows][0].launch()
        return True

    def record(self, rows: int, work: Recordable) -> None:
        """Record what was just run once. Where that is not possible, never try it again, and say
        so: everything else goes on."""
        if not self.works:
            return
        try:
            run = work.record(self._device)
        except DeviceLostError:
            raise
        except (DeviceError, StepError) as error:
            self.give_up(error)
            return
        if len(self._runs) >= MAX_RECORDED:
            self._runs.popitem(last=False)[1][0].close()
        self._runs[rows] = run, work

    def give_up(self, error: Exception) -> None:
        """Record nothing any more; what is recorded goes on."""
        self.works = False
        _log.warning("decode runs without CUDA graphs: %s", error)

    def clear(self) -> None:
        """Forget all of them."""
        while self._runs:
            self._runs.popitem()[1][0].close()
