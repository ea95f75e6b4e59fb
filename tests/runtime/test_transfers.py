"""Transfers are carried out in order; saving reads only what is missing, a few blocks at a time."""

from collections.abc import Sequence

import numpy as np

from trtllm_lite.runtime.backends.base import Batch, KVBlock, SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.block_store import BlockStore
from trtllm_lite.runtime.transfers import (
    BLOCKS_PER_READ,
    Load,
    Move,
    Release,
    Save,
    Swap,
    execute,
)


class Noting(FakeSession):
    """Notes the spans of every read."""

    def __init__(self) -> None:
        super().__init__(SessionOptions(num_slots=3, capacity=64))
        self.reads: list[tuple[int, list[tuple[int, int]]]] = []

    def read(self, slot: int, spans: Sequence[tuple[int, int]]) -> list[KVBlock]:
        self.reads.append((slot, list(spans)))
        return super().read(slot, spans)

    def fill(self, slot: int, tokens: list[int]) -> None:
        n = len(tokens)
        one = np.array([n], np.int32)
        zero = np.zeros(1, np.int32)
        ids = np.array([tokens], np.int64)
        self.run(Batch("prefill", slot, ids, zero, one, one, np.array([[n - 1]])))

    def next_logits(self, slot: int, past: int, token: int) -> list[float]:
        one = np.ones(1, np.int32)
        ids, lens = np.array([[token]]), np.array([past], np.int32)
        batch = Batch("decode", slot, ids, lens, one, lens + one, np.zeros((1, 1), np.int64))
        logits: list[float] = self.run(batch)[0, 0].tolist()
        return logits


def chain(length: int) -> tuple[bytes, ...]:
    return tuple(bytes([i]) for i in range(length))


def test_memory_transfers_happen_in_their_order() -> None:
    session, store = Noting(), BlockStore(10**6)
    session.fill(0, [1, 2])
    session.fill(1, [3, 4])
    execute([Move(0, 2, 2), Release(0), Swap(1, 2, 2), Move(2, 0, 2)], session, store)
    assert session.next_logits(0, 2, 9) == session.reference([3, 4, 9]).tolist()
    assert session.next_logits(1, 2, 9) == session.reference([1, 2, 9]).tolist()


def test_saved_blocks_can_be_loaded_elsewhere() -> None:
    session, store = Noting(), BlockStore(10**6)
    session.fill(0, [1, 2, 3, 4, 5])
    execute([Save(0, chain(2), 2), Release(0)], session, store)
    execute([Load(1, store.match(chain(2)))], session, store)
    assert session.next_logits(1, 4, 5) == session.reference([1, 2, 3, 4, 5]).tolist()


def test_only_missing_blocks_are_read_once() -> None:
    session, store = Noting(), BlockStore(10**6)
    session.fill(0, list(range(8)))
    execute([Save(0, chain(1), 2), Save(0, chain(3), 2), Save(0, chain(3), 2)], session, store)
    assert session.reads == [(0, [(0, 2)]), (0, [(2, 4), (4, 6)])]


def test_a_long_chain_is_read_in_pieces() -> None:
    session, store = Noting(), BlockStore(10**6)
    session.fill(0, list(range(40)))
    execute([Save(0, chain(40), 1)], session, store)
    assert [len(spans) for _, spans in session.reads] == [BLOCKS_PER_READ, BLOCKS_PER_READ, 8]
    assert store.count(chain(40)) == 40


def test_reading_ends_when_the_store_is_full() -> None:
    session = Noting()
    store = BlockStore(3 * session.info.kv_bytes_per_token)
    session.fill(0, list(range(40)))
    execute([Save(0, chain(40), 1)], session, store)
    assert len(session.reads) == 1
    assert store.count(chain(40)) == 3
