"""How fast this process can read memory: the limit of decoding one request.

Each token of a lone request reads every weight once, so no decoder can take less time per token
than weight bytes / read bandwidth.
"""

import time
from concurrent.futures import ThreadPoolExecutor

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
    """The best rate over `passes` passes. Sums of integers: numpy gives up the interpreter lock
    and one core sums faster than it can be fed."""
    # Ones, not zeros: untouched zero pages would all be the same page of memory.
    parts = np.array_split(np.ones(size // 8, np.int64), threads)
    read = sum(part.nbytes for part in parts)
    with ThreadPoolExecutor(threads) as pool:
        return read / min(_pass(pool, parts) for _ in range(passes))


def _pass(pool: ThreadPoolExecutor, parts: list[np.typing.NDArray[np.int64]]) -> float:
    start = time.perf_counter()
    list(pool.map(np.sum, parts))
    return time.perf_counter() - start
