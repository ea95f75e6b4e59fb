"""A bounded store of KV blocks, keyed by the tokens that they and all blocks before them hold.

A key is chained: key_i = sha256(key_{i-1} + the tokens of block i as little-endian int64), starting
from a root that names the rope regime. Equal keys mean equal token prefixes in an equal regime, so
a block can be used wherever its key matches (the idea of vLLM's automatic prefix caching).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from trtllm_lite.runtime.backends.base import KVBlock


def root_key(salt: bytes) -> bytes:
    """Where the chains of one regime begin."""
    return sha256(b"trtllm-lite kv block chain\0" + salt).digest()


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the block that holds `token_ids` and follows the block of key `parent`."""
    return sha256(parent + np.asarray(token_ids, dtype="<i8").tobytes()).digest()


@dataclass(frozen=True, eq=False)
class StoredBlock:
    """One kept block and the key of the block before it; None for the first of a chain."""

    parent: bytes | None
    block: KVBlock


class BlockStore:
    """At most `limit_bytes` of blocks, least recently used first out.

    Chains are tuples of keys from the first block of a sequence on, without the root. Touching a
    block touches all blocks before it, later: a parent is always more recent than its children, so
    what goes first is always the end of a chain, and no kept block is out of reach.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._stored: OrderedDict[bytes, StoredBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def items(self) -> Iterator[tuple[bytes, StoredBlock]]:
        """Key and block of everything kept, least recently used first."""
        return iter(self._stored.items())

    def count(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of the chain are kept. Touches nothing."""
        for index, key in enumerate(keys):
            if key not in self._stored:
                return index
        return len(keys)

    def match(self, keys: Sequence[bytes]) -> tuple[KVBlock, ...]:
        """The kept leading blocks of the chain, which become the most recent ones."""
        found = keys[: self.count(keys)]
        self._touch(found)
        return tuple(self._stored[key].block for key in found)

    def put(self, keys: Sequence[bytes], blocks: Sequence[KVBlock]) -> int:
        """Keep `blocks`, the last ones of the chain `keys`, and return `count(keys)` after it.

        Others are evicted to make room, blocks of this chain never: what does not fit is left out,
        and so is what would have no parent in the store.
        """
        first = len(keys) - len(blocks)
        self._touch(keys[: min(first, self.count(keys))])
        for index in range(first, len(keys)):
            parent = keys[index - 1] if index else None
            if not self._keep(keys[index], parent, blocks[index - first], chain_length=index):
                break
        kept = self.count(keys)
        self._touch(keys[:kept])
        return kept

    def evict(self) -> bool:
        """Drop the least recently used block. False when there is none."""
        if not self._stored:
            return False
        _, stored = self._stored.popitem(last=False)
        self.nbytes -= stored.block.nbytes
        return True

    def clear(self) -> None:
        """Drop everything."""
        self._stored.clear()
        self.nbytes = 0

    def _keep(self, key: bytes, parent: bytes | None, block: KVBlock, chain_length: int) -> bool:
        """Insert one block, as the most recent. `chain_length` blocks before it must stay."""
        if key in self._stored:
            self._stored.move_to_end(key)
            return True
        if parent is not None and parent not in self._stored:
            return False
        if block.nbytes > self.limit_bytes:
            return False
        while self.nbytes + block.nbytes > self.limit_bytes:
            if len(self._stored) <= chain_length:
                return False
            self.evict()
        self._stored[key] = StoredBlock(parent, block)
        self.nbytes += block.nbytes
        return True

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._stored.move_to_end(key)
