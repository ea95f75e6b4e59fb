"""Where sequences sit: slots, kept prefixes and the transfers that follow, for the scheduler."""

from trtllm_lite.runtime.kv_cache import KVCache
from trtllm_lite.runtime.prefix_cache import PrefixCache
from trtllm_lite.runtime.request import Sequence
from trtllm_lite.runtime.transfers import Load, Transfer


class Placement:
    """Changes the slot books and collects, in order, what the memory has to do for it.

    `recompute_at`: see KVSpec. Nothing here looks at the queue or ends a sequence.
    """

    def __init__(
        self, kv_cache: KVCache, prefix_cache: PrefixCache, recompute_at: int | None
    ) -> None:
        self.kv = kv_cache
        self.prefix = prefix_cache
        self._recompute_at = recompute_at
        self._transfers: list[Transfer] = []
        self._moved = False
        """Whether a slot has changed hands since the last `drain`."""

    def admit(self, sequence: Sequence, *, reuse: bool) -> None:
        """Give it a slot and, with `reuse`, the longest kept prefix of its tokens."""
        self.kv.admit(sequence)
        self._moved = True
        self._begin(sequence, reuse=reuse)
        cached = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        sequence.num_cached_tokens = cached

    def settle(self, sequence: Sequence, *, sampled: bool) -> None:
        """After it has advanced: its regime changes, or its prefill is done, or neither."""
        if sampled and len(sequence.token_ids) - 1 == self._recompute_at:
            # All its KV is of the regime that it has just left.
            self._save(sequence)
            self._transfers += self.kv.reset(sequence)
            self._moved = True
            sequence.num_computed_tokens = 0
            self._begin(sequence, reuse=True)
        elif not self.kv.is_decoding(sequence) and sequence.is_decoding:
            self._save(sequence)
            self._promote(sequence)

    def vacate(self, sequence: Sequence, *, keep: bool) -> None:
        """Take its slot away; with `keep`, its full blocks stay in the store."""
        if keep:
            self._save(sequence)
        self._transfers += self.kv.free(sequence)
        self._moved = True
        sequence.slot = None

    def clear(self) -> None:
        """Everything leaves, nothing is kept, and what was still to be transferred is void."""
        for owner in self.kv.owners:
            if owner is not None:
                owner.slot = None
        self._transfers = self.kv.clear()
        self._moved = True

    def drain(self) -> tuple[Transfer, ...]:
        """The transfers since the last call. Slots noted in the sequences follow the books."""
        if not self._moved:
            # No slot has changed hands, so there is nothing to load or to keep either.
            return ()
        self._moved = False
        for slot, owner in enumerate(self.kv.owners):
            if owner is not None:
                owner.slot = slot
        transfers, self._transfers = tuple(self._transfers), []
        return transfers

    def _begin(self, sequence: Sequence, *, reuse: bool) -> None:
        """Start a sequence that has a slot above the decode region and nothing computed."""
        self.prefix.begin(sequence)
        blocks = self.prefix.match(sequence) if reuse else ()
        matched = sum(block.num_tokens for block in blocks)
        if sequence.num_generated_tokens and matched == len(sequence.token_ids) - 1:
            # Promoted before the load, when there is nothing of it to copy yet.
            self._promote(sequence)
        if blocks:
            self._transfers.append(Load(self.kv.slot_of(sequence), blocks))
        sequence.num_computed_tokens = matched

    def _promote(self, sequence: Sequence) -> None:
        self._transfers += self.kv.promote(sequence)
        self._moved = True

    def _save(self, sequence: Sequence) -> None:
        self._transfers += self.prefix.save(sequence, self.kv.slot_of(sequence))
