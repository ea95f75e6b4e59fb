"""The memory and the one stream of an accelerator, as little of them as a session needs.

Addresses are plain integers, as CUDA's runtime and TensorRT take them; arithmetic on them is the
caller's. Host buffers are pinned, and have an address too, so that one kind of copy serves every
direction. Whatever is not said to wait is only queued: it happens in the order of the calls, at the
latest in `synchronize`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.errors import TrtllmLiteError

ALIGNMENT = 256
"""Bytes. Where every tensor of a TensorRT engine has to begin (IExecutionContext's
setTensorAddress), and where CUDA begins every allocation."""


class DeviceError(TrtllmLiteError):
    """A call of the accelerator's runtime failed."""


class DeviceLostError(DeviceError):
    """Nothing on the device can be used any more by this process: every later call fails too, and
    what was computed lately may be wrong. So it is after most failures of a queued operation."""


class DeviceMemoryError(DeviceError):
    """There is not that much free memory."""


@dataclass(frozen=True, eq=False)
class HostBuffer:
    """Pinned memory of the host: its bytes and its address."""

    array: npt.NDArray[np.uint8]
    address: int

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


class Recorded(Protocol):
    """Queued work that was recorded once and can be queued again in one call."""

    def launch(self) -> None:
        """Queue all of it, with the addresses and shapes that it was recorded with."""

    def close(self) -> None:
        """Forget it. Idempotent."""


class Device(Protocol):
    """One accelerator with one stream. Every method but `close` raises DeviceError."""

    @property
    def name(self) -> str:
        """As people know it."""

    @property
    def gpu(self) -> str:
        """What kind it is, as plans are built for: "sm89" is compute capability 8.9."""

    @property
    def stream(self) -> int:
        """The handle of the stream, for libraries that queue work themselves."""

    def use(self) -> None:
        """Make it the device of the calling thread, which need not be the one that opened it."""

    def allocate(self, nbytes: int) -> int:
        """The address of uninitialised memory on the device, a multiple of ALIGNMENT. Raises
        DeviceMemoryError."""

    def allocate_host(self, nbytes: int) -> HostBuffer:
        """Raises DeviceMemoryError."""

    def free(self, address: int) -> None:
        """Give back memory of either kind. Waits for queued work."""

    def fill_zero(self, address: int, nbytes: int) -> None:
        """Queue the zeroing of memory on the device."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between two places, each on the device or in a host buffer, that do not
        overlap."""

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Queue a copy of `rows` rows of `width` bytes, which begin `pitch` bytes apart."""

    def record(self, queue_work: Callable[[], None]) -> Recorded:
        """What `queue_work` queues, recorded and not done. It must not allocate, free or wait."""

    def synchronize(self) -> None:
        """Wait until everything queued is done. Raises DeviceError for what failed in it."""

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""

    def close(self) -> None:
        """Give everything back, whatever was allocated. Idempotent."""
