"""How fast this process can read memory: the limit of decoding one request.

Each token of a lone request reads every weight once, so no decoder can take less time per token
than weight bytes / read bandwidth.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np

BUFFER_BYTES = 512 * 2**20
LEAST_BYTES = 256 * 2**20
PASSES = 6


def read_bandwidth(threads: int, available: int | None = None) -> float | None:
    """Bytes per second of the best of several reads of a buffer much larger than the caches, with
    `threads` threads. None where less than four times the least buffer is `available`."""
    size = BUFFER_BYTES if available is None else min(BUFFER_BYTES, available // 4)
    if size < LEAST_BYTES:
        return None
    return measure(threads, size, PASSES)


def measure(threads: int, size: int, passes: int) -> float:
    """The best rate over `passes` passes."""
    with MemoryReader(threads, size) as reader:
        return reader.rate(passes)


class MemoryReader:
    """A buffer of `size` bytes, and the threads that read it."""

    def __init__(self, threads: int, size: int) -> None:
        # Ones, not zeros: untouched zero pages would all be the same page of memory.
        self._parts = np.array_split(np.ones(size // 8, np.int64), threads)
        self._pool = ThreadPoolExecutor(threads)

    def rate(self, passes: int) -> float:
        """Bytes per second of the best of `passes` reads. Sums of integers: numpy gives up the
        interpreter lock and one core sums faster than it can be fed."""
        return sum(part.nbytes for part in self._parts) / min(self._pass() for _ in range(passes))

    def _pass(self) -> float:
        start = time.perf_counter()
        list(self._pool.map(np.sum, self._parts))
        return time.perf_counter() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
