"""A device that is memory of the host, and stricter than a real one: for tests and docs.

Addresses are made up, so that a host address on the device, or the other way round, is caught.
Queued work is done when somebody waits, not before: who reads too early, or changes a host buffer
that is still to be copied, gets wrong numbers here as on a GPU. Memory on the device begins as NaN
of every float type. What a GPU would answer with a crash or with silence, a range that was not
allocated above all, raises DeviceError; where that happens in queued work, the device is lost, as a
GPU is to the process.
"""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.device import (
    ALIGNMENT,
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    HostBuffer,
)

Bytes = npt.NDArray[np.uint8]
Work = Callable[[], None]

FIRST_ADDRESS = 0x7F00_0000_0000
POISON = 0xFF


class FakeRecorded:
    """Work recorded on a `FakeDevice`. `launches` counts."""

    def __init__(self, device: "FakeDevice", work: list[Work]) -> None:
        self._device, self._work = device, work
        self.launches = 0

    def launch(self) -> None:
        if not self._work:
            raise DeviceError("the recorded work was closed, or nothing was recorded")
        self.launches += 1
        for work in self._work:
            self._device.queue(work)

    def close(self) -> None:
        self._work = []


class FakeDevice:
    """A `Device` of `total` bytes. Not thread-safe."""

    name = "fake"
    gpu = "sm89"

    def __init__(self, total: int = 2**30) -> None:
        self._total = total
        self._next = FIRST_ADDRESS
        self._ranges: dict[int, tuple[Bytes, bool]] = {}
        """By the address where it begins: bytes, and whether they are on the device."""
        self._queue: list[Work] = []
        self._recording: list[Work] | None = None
        self._lost: str | None = None
        self.recorded: list[FakeRecorded] = []

    @property
    def stream(self) -> int:
        return id(self)

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where every allocation begins that was not given back."""
        return tuple(self._ranges)

    def use(self) -> None:
        """There is one device in every thread."""
        self._check_lost()

    def allocate(self, nbytes: int) -> int:
        free = self.memory()[0]
        if nbytes > free:
            raise DeviceMemoryError(f"fake: {nbytes} bytes asked for, {free} are free")
        return self._add(np.full(nbytes, POISON, np.uint8), on_device=True)

    def allocate_host(self, nbytes: int) -> HostBuffer:
        array = np.full(nbytes, POISON, np.uint8)
        return HostBuffer(array, self._add(array, on_device=False))

    def free(self, address: int) -> None:
        self.synchronize()
        self._not_recording("free")
        if address not in self._ranges:
            raise DeviceError(f"fake: nothing was allocated at {address:#x}")
        del self._ranges[address]

    def fill_zero(self, address: int, nbytes: int) -> None:
        self.queue(lambda: self.bytes_at(address, nbytes, on_device=True).fill(0))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.copy_rows(target, nbytes, source, nbytes, nbytes, 1)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        if width > min(target_pitch, source_pitch) or min(width, rows) < 1:
            raise DeviceError(f"fake: a copy of {rows} rows of {width} bytes is not possible")

        def work() -> None:
            for row in range(rows):
                into = self.bytes_at(target + row * target_pitch, width)
                into[:] = self.bytes_at(source + row * source_pitch, width).copy()

        self.queue(work)

    def record(self, queue_work: Work) -> FakeRecorded:
        self._not_recording("record")
        self._recording = []
        try:
            queue_work()
            recorded = FakeRecorded(self, self._recording)
        finally:
            self._recording = None
        self.recorded.append(recorded)
        return recorded

    def synchronize(self) -> None:
        """What fails takes the work behind it with it, and all that comes later."""
        self._check_lost()
        self._not_recording("synchronize")
        queue, self._queue = self._queue, []
        try:
            for work in queue:
                work()
        except Exception as error:
            self.lose(str(error))
            raise DeviceLostError(str(error)) from error

    def lose(self, why: str) -> None:
        """From here on nothing works any more."""
        self._lost = why

    def memory(self) -> tuple[int, int]:
        used = sum(array.nbytes for array, on_device in self._ranges.values() if on_device)
        return self._total - used, self._total

    def close(self) -> None:
        self._queue.clear()
        self._ranges.clear()

    def queue(self, work: Work) -> None:
        """Let `work` be done in its turn, or be recorded."""
        self._check_lost()
        (self._queue if self._recording is None else self._recording).append(work)

    def bytes_at(self, address: int, nbytes: int, *, on_device: bool | None = None) -> Bytes:
        """The memory itself. Raises DeviceError for a range that is not wholly inside one
        allocation, or of the other kind than `on_device` says."""
        starts = sorted(self._ranges)
        place = bisect_right(starts, address) - 1
        if place >= 0:
            array, is_device = self._ranges[starts[place]]
            offset = address - starts[place]
            if offset + nbytes <= array.nbytes and on_device in (None, is_device):
                return array[offset : offset + nbytes]
        kind = {True: "device ", False: "host ", None: ""}[on_device]
        raise DeviceError(f"fake: {nbytes} bytes at {address:#x} are no {kind}memory")

    def _add(self, array: Bytes, *, on_device: bool) -> int:
        """A gap behind each allocation lets overruns be seen."""
        self._not_recording("allocate")
        address = self._next
        self._next += -(-(array.nbytes + 1) // ALIGNMENT) * ALIGNMENT
        self._ranges[address] = array, on_device
        return address

    def _check_lost(self) -> None:
        if self._lost is not None:
            raise DeviceLostError(self._lost)

    def _not_recording(self, what: str) -> None:
        if self._recording is not None:
            raise DeviceError(f"fake: {what} is not allowed while work is recorded")
