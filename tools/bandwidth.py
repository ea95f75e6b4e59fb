"""How fast this process can read memory: the limit of decoding one request.

Each token of a lone request reads every weight once, so no decoder can take less time per token
than weight bytes / read bandwidth.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np

from trtllm_lite.runtime.host import physical_cores

BUFFER_BYTES = 512 * 2**20
LEAST_BYTES = 256 * 2**20
PASSES = 6
TYPICAL_PASSES = 24
PRODUCT_SIZE = 1024


def read_bandwidth(threads: int, available: int | None = None) -> float | None:
    """Bytes per second of the best of several reads of a buffer much larger than the caches, with
    `threads` threads. None where less than four times the least buffer is `available`."""
    size = BUFFER_BYTES if available is None else min(BUFFER_BYTES, available // 4)
    if size < LEAST_BYTES:
        return None
    return measure(threads, size, PASSES)


def typical_bandwidth(threads: int, available: int | None = None) -> float | None:
    """Bytes per second over many reads together, as a run of some seconds finds it on a machine
    whose rate changes; None as for `read_bandwidth`."""
    size = LEAST_BYTES if available is None else min(LEAST_BYTES, available // 4)
    if size < LEAST_BYTES:
        return None
    with MemoryReader(threads, size) as reader:
        return reader.mean_rate(TYPICAL_PASSES)


def product_rate(threads: int) -> float:
    """Multiplications and additions a second in float32 products of large matrices. numpy's library
    uses every core; of fewer `threads` it is their share."""
    a = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    best = min(_seconds(lambda: a @ a) for _ in range(PASSES))
    return 2 * PRODUCT_SIZE**3 / best * min(1.0, threads / physical_cores())


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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

    def mean_rate(self, passes: int) -> float:
        """Bytes per second of `passes` reads together."""
        seconds = sum(self._pass() for _ in range(passes))
        return passes * sum(part.nbytes for part in self._parts) / seconds

    def _pass(self) -> float:
        return _seconds(lambda: list(self._pool.map(np.sum, self._parts)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
