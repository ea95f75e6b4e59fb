"""The pool's memory against plain arrays, and its pages against the system's own count."""

import mmap
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.kv_pool import KVPool
from trtllm_lite.runtime.manifest import KVLayer, KVSpec

SLOTS, CAPACITY = 3, 9
KV = KVSpec("float32", (KVLayer(2, 4), KVLayer(1, 8)))

slots = st.integers(0, SLOTS - 1)
lengths = st.integers(0, CAPACITY)
spans = st.lists(lengths, min_size=2, max_size=4).map(sorted)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("move"), slots, slots, lengths),
        st.tuples(st.just("swap"), slots, slots, lengths),
        st.tuples(st.just("copy"), slots, slots, spans),
    ),
    max_size=12,
)


def filled_pool() -> KVPool:
    pool = KVPool(KV, SLOTS, CAPACITY)
    rng = np.random.default_rng(0)
    for array in (*pool.keys, *pool.values):
        array[...] = rng.standard_normal(array.shape)
    return pool


@settings(deadline=None)
@given(operations)
def test_transfers_equal_a_table_of_tokens(steps: list[tuple[str, int, int, object]]) -> None:
    """The reference keeps, for each slot and position, which cell its content came from."""
    pool = filled_pool()
    original = [a.copy() for a in (*pool.keys, *pool.values)]
    origin = [[(slot, i) for i in range(CAPACITY)] for slot in range(SLOTS)]
    for name, a, b, argument in steps:
        if isinstance(argument, int):
            kept = list(origin[b][:argument])
            origin[b][:argument] = origin[a][:argument]
            if name == "move":
                pool.move(a, b, argument)
            else:
                pool.swap(a, b, argument)
                origin[a][:argument] = kept
        elif isinstance(argument, list):
            cuts = list(pairwise(argument))
            pool.write(b, argument[0], pool.read(a, cuts))
            origin[b][argument[0] : argument[-1]] = origin[a][argument[0] : argument[-1]]
    for array, first in zip((*pool.keys, *pool.values), original, strict=True):
        for slot, cells in enumerate(origin):
            for position, (s, i) in enumerate(cells):
                np.testing.assert_array_equal(array[slot, :, position], first[s, :, i])


def test_blocks_are_copies() -> None:
    pool = filled_pool()
    (block,) = pool.read(1, [(2, 5)])
    kept = block.keys[0].copy()
    pool.keys[0][...] = 0
    np.testing.assert_array_equal(block.keys[0], kept)
    assert block.nbytes == 3 * KV.bytes_per_token


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="the system keeps its pages")
def test_release_drops_the_whole_pages_of_one_slot_only() -> None:
    capacity = 3 * mmap.PAGESIZE // 2 // 32
    pool = KVPool(KVSpec("float32", (KVLayer(1, 8),)), 3, capacity)
    for array in (*pool.keys, *pool.values):
        array[...] = 1
    pool.release(1)
    for array in (*pool.keys, *pool.values):
        assert (array[[0, 2]] == 1).all()
        flat = array.reshape(-1)
        page = mmap.PAGESIZE // 4
        assert (flat[2 * page : 3 * page] == 0).all()
        assert (flat[: 2 * page] == 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_pool_costs_only_what_was_touched_and_gives_it_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    kv = KVSpec("float16", (KVLayer(4, 64),) * 4)
    before = resident()
    pool = KVPool(kv, 8, 2**15)
    assert 8 * 2**15 * kv.bytes_per_token == 2**30
    for array in (*pool.keys, *pool.values):
        array[3, :, :4096] = 1
    assert 2**23 < resident() - before < 2**26
    pool.release(3)
    assert resident() - before < 2**23


def test_dtypes_and_shapes() -> None:
    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}
    for name, dtype in kinds.items():
        pool = KVPool(KVSpec(name, KV.layers), SLOTS, CAPACITY)
        assert [a.shape for a in pool.keys] == [(3, 2, 9, 4), (3, 1, 9, 8)]
        assert {a.dtype for a in (*pool.keys, *pool.values)} == {np.dtype(dtype)}


def test_slots_and_lengths_outside_the_pool_are_refused() -> None:
    pool = filled_pool()
    blocks = pool.read(0, [(0, 5), (5, 9)])
    for call in (
        lambda: pool.move(0, SLOTS, 1),
        lambda: pool.move(-1, 0, 1),
        lambda: pool.swap(0, 1, CAPACITY + 1),
        lambda: pool.read(0, [(0, CAPACITY + 1)]),
        lambda: pool.write(0, 1, blocks),
        lambda: pool.release(SLOTS),
    ):
        with pytest.raises(IndexError):
            call()
