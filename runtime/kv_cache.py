"""The books of the KV pool: which sequence owns which slot. It touches no memory."""

from collections.abc import Sequence as Ordered

from trtllm_lite.runtime.request import Sequence
from trtllm_lite.runtime.transfers import Move, Release, Swap, Transfer


class KVCache:
    """Slot owners. Slots 0 .. num_decoding - 1 are exactly the decoding sequences, so that one
    decode batch binds the leading rows of the pool; sequences in prefill sit in any slot above.

    Methods change the books and return the transfers that make the memory follow, in order. How
    many tokens a transfer carries is `num_computed_tokens` of the owner when the method is called.
    """

    def __init__(self, num_slots: int) -> None:
        self._owners: list[Sequence | None] = [None] * num_slots
        self._slots: dict[Sequence, int] = {}
        """The same the other way round."""
        self._num_decoding = 0
        self._decoding: tuple[Sequence, ...] | None = ()
        """`decoding`, until the books change."""

    @property
    def owners(self) -> tuple[Sequence | None, ...]:
        """The owner of every slot, by slot."""
        return tuple(self._owners)

    @property
    def decoding(self) -> Ordered[Sequence]:
        """The owners of slots 0 .. num_decoding - 1."""
        if self._decoding is None:
            leading = self._owners[: self._num_decoding]
            self._decoding = tuple(x for x in leading if x is not None)
        return self._decoding

    @property
    def num_decoding(self) -> int:
        return self._num_decoding

    @property
    def num_slots(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return self._owners.count(None)

    def slot_of(self, sequence: Sequence) -> int:
        """Its slot. Raises ValueError when it has none."""
        slot = self._slots.get(sequence)
        if slot is None:
            raise ValueError(f"sequence {sequence.id} has no slot")
        return slot

    def is_decoding(self, sequence: Sequence) -> bool:
        """Whether it sits in the decode region."""
        return self.slot_of(sequence) < self._num_decoding

    def admit(self, sequence: Sequence) -> int:
        """Give it the lowest free slot. Raises ValueError when none is free or it has one."""
        if sequence in self._slots:
            raise ValueError(f"sequence {sequence.id} has a slot already")
        if None not in self._owners:
            raise ValueError(f"no slot is free for sequence {sequence.id}")
        slot = self._owners.index(None)
        self._put(slot, sequence)
        return slot

    def promote(self, sequence: Sequence) -> list[Transfer]:
        """Its prefill is done: bring it into the decode region, as the last row of it."""
        slot, target = self.slot_of(sequence), self._num_decoding
        if slot < target:
            raise ValueError(f"sequence {sequence.id} is decoding already")
        other = self._owners[target]
        self._put(target, sequence)
        if other is not sequence:
            self._put(slot, other)
        self._num_decoding += 1
        if slot == target:
            return []
        length = sequence.num_computed_tokens
        if other is None:
            return _move(slot, target, length)
        length = max(length, other.num_computed_tokens)
        return [Swap(target, slot, length)] if length else []

    def reset(self, sequence: Sequence) -> list[Transfer]:
        """Its tokens will be computed again from the first: it keeps a slot, not its content.

        If it was decoding, the last decoding row takes its place, and it takes that row's.
        """
        slot = self.slot_of(sequence)
        if slot >= self._num_decoding:
            return [Release(slot)]
        last = self._num_decoding - 1
        row = self._owners[last]
        self._put(slot, row)
        self._put(last, sequence)
        self._num_decoding = last
        if row is None or row is sequence:
            return [Release(last)]
        return _move(last, slot, row.num_computed_tokens)

    def free(self, sequence: Sequence) -> list[Transfer]:
        """It leaves. If it was decoding, the last decoding row takes its place."""
        transfers = self.reset(sequence)
        self._put(self.slot_of(sequence), None)
        del self._slots[sequence]
        return transfers

    def clear(self) -> list[Transfer]:
        """Everything leaves. Free slots are released too: earlier transfers may not have been
        carried out."""
        self._owners = [None] * len(self._owners)
        self._slots.clear()
        self._num_decoding, self._decoding = 0, ()
        return [Release(slot) for slot in range(len(self._owners))]

    def _put(self, slot: int, sequence: Sequence | None) -> None:
        self._owners[slot], self._decoding = sequence, None
        if sequence is not None:
            self._slots[sequence] = slot


def _move(source: int, target: int, length: int) -> list[Transfer]:
    moves: list[Transfer] = [Move(source, target, length)] if length else []
    return [*moves, Release(source)]
