"""A device that is memory of the host, with its real addresses: for graphs of a GPU target that are
proved on a CPU. Work is done at once, so it never has to be waited for."""

import ctypes
import mmap
from collections.abc import Callable

import numpy as np

from trtllm_lite.runtime.backends.device import (
    DeviceError,
    DeviceMemoryError,
    HostBuffer,
    Recorded,
)
from trtllm_lite.runtime.host import available_memory


class HostDevice:
    """A `Device`. What is given back may not be used any more; nothing checks that."""

    name = "cpu"
    gpu = "cpu"
    stream = 0

    def __init__(self) -> None:
        self._kept: dict[int, mmap.mmap] = {}

    def use(self) -> None:
        """There is one device in every thread."""

    def allocate(self, nbytes: int) -> int:
        return self.allocate_host(nbytes).address

    def allocate_host(self, nbytes: int) -> HostBuffer:
        """Whole pages, which come with the first touch and are zero then."""
        try:
            pages = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise DeviceMemoryError(f"host: {nbytes} bytes cannot be had") from error
        array = np.frombuffer(pages, np.uint8, nbytes)
        self._kept[array.ctypes.data] = pages
        return HostBuffer(array, array.ctypes.data)

    def free(self, address: int) -> None:
        """Views of the memory keep it alive."""
        if self._kept.pop(address, None) is None:
            raise DeviceError(f"host: nothing was allocated at {address:#x}")

    def fill_zero(self, address: int, nbytes: int) -> None:
        """A whole allocation is zeroed by giving its pages back."""
        pages = self._kept.get(address)
        if pages is not None and len(pages) == nbytes:
            pages.madvise(mmap.MADV_DONTNEED)
        else:
            ctypes.memset(address, 0, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def record(self, queue_work: Callable[[], None]) -> Recorded:
        raise DeviceError("host: work that is done at once cannot be recorded")

    def synchronize(self) -> None:
        """Everything is done."""

    def memory(self) -> tuple[int, int]:
        free = available_memory() or 0
        return free, free

    def close(self) -> None:
        self._kept.clear()
