"""What slots cost: nothing while they are idle, and nothing again once they are free."""

from collections.abc import Callable

import numpy as np

from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.onnxruntime import open_session
from trtllm_lite.runtime.bundle import Bundle

SLOTS, CAPACITY = 16, 8192
MIB = 2**20


def test_idle_slots_cost_nothing_and_freed_ones_give_their_pages_back(
    heavy_bundle: Bundle, memory_in_use: Callable[[], int]
) -> None:
    kv = heavy_bundle.manifest.kv
    assert SLOTS * CAPACITY * kv.bytes_per_token == 128 * MIB
    options = SessionOptions(SLOTS, CAPACITY, intra_op_num_threads=1)
    open_session(heavy_bundle, SessionOptions(1, 1, intra_op_num_threads=1)).close()
    small = open_session(heavy_bundle, SessionOptions(1, 8, intra_op_num_threads=1))
    before = memory_in_use()
    small.close()
    session = open_session(heavy_bundle, options)
    idle = memory_in_use()
    assert idle - before < 24 * MIB
    for array in (*session.pool.keys, *session.pool.values):
        array[3:11] = np.float32(1)
    assert memory_in_use() - idle > 60 * MIB
    for slot in range(3, 11):
        session.release(slot)
    assert memory_in_use() - idle < 4 * MIB
