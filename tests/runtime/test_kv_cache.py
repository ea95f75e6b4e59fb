"""The slot books, and that memory which follows the transfers always holds what the books say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.kv_cache import KVCache
from trtllm_lite.runtime.request import Request, Sequence
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.transfers import Move, Release, Swap, Transfer


def sequence(name: str, computed: int = 0, length: int = 10) -> Sequence:
    request = Request(name, tuple(range(length)), SamplingParams())
    return Sequence(request, 0, list(range(length)), 99, num_computed_tokens=computed)


def filled(num_slots: int, decoding: int, prefilling: int) -> tuple[KVCache, list[Sequence]]:
    """A cache with `decoding` promoted sequences of 9 tokens, then `prefilling` ones of 4."""
    cache = KVCache(num_slots)
    sequences = [sequence(str(i)) for i in range(decoding + prefilling)]
    for i, s in enumerate(sequences):
        cache.admit(s)
        s.num_computed_tokens = 9 if i < decoding else 4
        if i < decoding:
            assert cache.promote(s) == []
    return cache, sequences


def test_admission_takes_the_lowest_free_slot_above_the_decode_region() -> None:
    cache, (_, b, c) = filled(4, 1, 2)
    cache.free(b)
    d = sequence("d")
    assert cache.admit(d) == 1
    assert cache.admit(sequence("e")) == 3
    assert cache.slot_of(c) == 2
    assert cache.num_free == 0


def test_admission_needs_a_free_slot_and_a_newcomer() -> None:
    cache, (a, _) = filled(2, 1, 1)
    with pytest.raises(ValueError, match="has a slot already"):
        cache.admit(a)
    with pytest.raises(ValueError, match="no slot is free"):
        cache.admit(sequence("c"))


def test_the_slot_of_a_sequence_without_one_is_an_error() -> None:
    cache, (a, b, c) = filled(4, 2, 1)
    cache.free(a)
    for gone in (a, sequence("d")):
        with pytest.raises(ValueError, match="has no slot"):
            cache.slot_of(gone)
    assert [cache.slot_of(s) for s in (b, c)] == [0, 2]
    cache.clear()
    with pytest.raises(ValueError, match="has no slot"):
        cache.slot_of(b)


def test_promotion_in_place_transfers_nothing() -> None:
    cache, (a, b) = filled(3, 1, 1)
    assert cache.promote(b) == []
    assert list(cache.decoding) == [a, b]


def test_promotion_into_a_free_slot_moves() -> None:
    cache, (a, b, c) = filled(4, 1, 2)
    cache.free(b)
    c.num_computed_tokens = 7
    assert cache.promote(c) == [Move(2, 1, 7), Release(2)]
    assert cache.owners == (a, c, None, None)


def test_promotion_over_another_prefill_swaps_the_longer_length() -> None:
    cache, (a, b, c) = filled(3, 1, 2)
    b.num_computed_tokens = 8
    assert cache.promote(c) == [Swap(1, 2, 8)]
    assert cache.owners == (a, c, b)
    assert cache.num_decoding == 2


def test_promotion_of_nothing_over_nothing_copies_nothing() -> None:
    cache, (a, b, c) = filled(3, 1, 2)
    b.num_computed_tokens = c.num_computed_tokens = 0
    assert cache.promote(c) == []
    assert cache.owners == (a, c, b)


def test_promoting_twice_is_refused() -> None:
    cache, (a,) = filled(2, 1, 0)
    with pytest.raises(ValueError, match="decoding already"):
        cache.promote(a)


def test_the_last_decoding_row_takes_the_place_of_one_that_leaves() -> None:
    cache, (a, b, c, d) = filled(4, 3, 1)
    assert cache.free(a) == [Move(2, 0, 9), Release(2)]
    assert cache.owners == (c, b, None, d)
    assert cache.num_decoding == 2


def test_the_last_row_leaves_without_a_move() -> None:
    cache, (a, b) = filled(2, 2, 0)
    assert cache.free(b) == [Release(1)]
    assert cache.owners == (a, None)


def test_a_prefilling_sequence_leaves_without_a_move() -> None:
    cache, (_, b, _) = filled(3, 1, 2)
    assert cache.free(b) == [Release(1)]


def test_reset_demotes_into_the_slot_of_the_last_decoding_row() -> None:
    cache, (a, b, c, d) = filled(4, 3, 1)
    assert cache.reset(a) == [Move(2, 0, 9), Release(2)]
    assert cache.owners == (c, b, a, d)
    assert list(cache.decoding) == [c, b]


def test_clear_empties_and_releases_every_slot() -> None:
    cache, (a, b, _) = filled(4, 1, 2)
    cache.free(b)
    assert list(cache.decoding) == [a]
    assert cache.clear() == [Release(slot) for slot in range(4)]
    assert cache.owners == (None,) * 4
    assert cache.num_decoding == len(cache.decoding) == 0


class Memory:
    """Slot contents as lists of (owner, position); None is memory that holds nothing."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.slots: list[list[tuple[str, int] | None]] = [[None] * capacity] * num_slots
        self.slots = [list(s) for s in self.slots]

    def follow(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            match transfer:
                case Move(source, target, n):
                    self.slots[target][:n] = self.slots[source][:n]
                case Swap(a, b, n):
                    kept = self.slots[a][:n]
                    self.slots[a][:n], self.slots[b][:n] = self.slots[b][:n], kept
                case Release(slot):
                    self.slots[slot] = [None] * len(self.slots[slot])

    def fill(self, slot: int, owner: Sequence) -> None:
        for i in range(owner.num_computed_tokens):
            self.slots[slot][i] = (owner.id, i)

    def holds(self, slot: int, owner: Sequence) -> bool:
        wanted = [(owner.id, i) for i in range(owner.num_computed_tokens)]
        return self.slots[slot][: len(wanted)] == wanted


@settings(max_examples=150, deadline=None)
@given(num_slots=st.integers(1, 5), data=st.data())
def test_memory_follows_the_books(num_slots: int, data: st.DataObject) -> None:
    cache, memory = KVCache(num_slots), Memory(num_slots, 10)
    present: list[Sequence] = []
    decoding: set[Sequence] = set()
    for turn in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["admit", "promote", "reset", "free"]))
        if action == "admit" and len(present) < num_slots:
            new = sequence(str(turn))
            free = [i for i, owner in enumerate(cache.owners) if owner is None]
            assert cache.admit(new) == min(free) >= cache.num_decoding
            new.num_computed_tokens = data.draw(st.integers(0, 10))
            memory.fill(cache.slot_of(new), new)
            present.append(new)
        elif action != "admit" and present:
            chosen = data.draw(st.sampled_from(present))
            if action == "promote" and chosen not in decoding:
                memory.follow(cache.promote(chosen))
                decoding.add(chosen)
            elif action == "reset":
                memory.follow(cache.reset(chosen))
                decoding.discard(chosen)
                chosen.num_computed_tokens = 0
            elif action == "free":
                memory.follow(cache.free(chosen))
                decoding.discard(chosen)
                present.remove(chosen)
        assert set(cache.decoding) == decoding
        assert None not in cache.owners[: cache.num_decoding]
        assert len(decoding) == cache.num_decoding
        assert {x for x in cache.owners if x is not None} == set(present)
        assert all(memory.holds(cache.slot_of(s), s) for s in present)
        freed = [i for i, owner in enumerate(cache.owners) if owner is None]
        assert all(memory.slots[i] == [None] * 10 for i in freed)
