"""Which blocks of a sequence can be reused or are worth keeping: between scheduler and store."""

from trtllm_lite.runtime.backends.base import KVBlock
from trtllm_lite.runtime.block_store import BlockStore, chain_key, root_key
from trtllm_lite.runtime.request import Sequence
from trtllm_lite.runtime.transfers import Save

SHORT_ROOT = root_key(b"short")
LONG_ROOT = root_key(b"long")


class PrefixCache:
    """Block keys of sequences, on the scheduler's behalf.

    `sequence.block_hashes` is the root of the regime in which its KV is computed, then the keys of
    its full blocks. A sequence longer than `recompute_at` tokens is of the long regime from its
    first token on (KVSpec.recompute_at), and blocks of the two regimes never meet.

    `block_bytes` is the size of one block: chains are cut to what the store can hold at all.
    """

    def __init__(
        self, store: BlockStore, *, block_size: int, block_bytes: int, recompute_at: int | None
    ) -> None:
        self._store = store
        self._block_size = block_size
        self._max_blocks = store.limit_bytes // max(block_bytes, 1)
        self._recompute_at = recompute_at
        self.query_tokens = 0
        self.hit_tokens = 0

    @property
    def enabled(self) -> bool:
        return self._max_blocks > 0

    def begin(self, sequence: Sequence) -> None:
        """The sequence starts from its first token: choose its regime."""
        limit = self._recompute_at
        is_long = limit is not None and len(sequence.token_ids) > limit
        sequence.block_hashes[:] = [LONG_ROOT if is_long else SHORT_ROOT]

    def match(self, sequence: Sequence) -> tuple[KVBlock, ...]:
        """The kept leading blocks; at least the last token is left to compute."""
        if not self.enabled:
            return ()
        self.query_tokens += len(sequence.token_ids)
        blocks = self._store.match(self._keys(sequence, len(sequence.token_ids) - 1))
        self.hit_tokens += len(blocks) * self._block_size
        return blocks

    def save(self, sequence: Sequence, slot: int) -> list[Save]:
        """What to keep of the computed tokens, if the store lacks any of it."""
        if not self.enabled:
            return []
        keys = self._keys(sequence, sequence.num_computed_tokens)
        if self._store.count(keys) == len(keys):
            return []
        return [Save(slot, keys, self._block_size)]

    def _keys(self, sequence: Sequence, num_tokens: int) -> tuple[bytes, ...]:
        """The chain of the full blocks in the first `num_tokens` tokens."""
        count = min(num_tokens // self._block_size, self._max_blocks)
        hashes = sequence.block_hashes
        for index in range(len(hashes) - 1, count):
            start = index * self._block_size
            tokens = sequence.token_ids[start : start + self._block_size]
            hashes.append(chain_key(hashes[-1], tokens))
        return tuple(hashes[1 : count + 1])
