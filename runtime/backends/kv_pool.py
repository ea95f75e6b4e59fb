"""The KV pool in host memory: per layer one array for K and one for V, paged in on first touch.

It owns the bytes and nothing else: which slot holds what is the engine's business.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_lite.runtime.backends.base import Array, KVBlock
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.manifest import KVSpec

# numpy has no bfloat16: its bits are kept as uint16, and nothing here computes with them.
NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "int32": np.int32,
    "int64": np.int64,
}

_MADV_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


@dataclass(frozen=True, eq=False)
class _Mapped:
    """One array [slots, kv_heads, capacity, head_dim] over its own anonymous pages."""

    array: Array
    pages: mmap.mmap | None

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int], dtype: type[np.generic]) -> "_Mapped":
        """Zeros that cost no memory until they are touched."""
        if not hasattr(mmap, "MAP_PRIVATE"):
            return cls(np.zeros(shape, dtype), None)
        # Shared anonymous pages, the default of mmap, would survive MADV_DONTNEED.
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(np.frombuffer(pages, dtype).reshape(shape), pages)

    def release(self, slot: int) -> None:
        """Give the whole pages inside the slot back; they read as zeros afterwards."""
        if self.pages is None or _MADV_DONTNEED is None:
            return
        stride = self.array.strides[0]
        start = -(-slot * stride // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (slot + 1) * stride // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            self.pages.madvise(_MADV_DONTNEED, start, stop - start)


class KVPool:
    """`num_slots` slots of `capacity` tokens. `keys[layer]` and `values[layer]` are the arrays
    [num_slots, kv_heads, capacity, head_dim] that graphs are bound to; bfloat16 is held as uint16.

    Raises UsageError when the address space for it cannot be had.
    """

    def __init__(self, kv: KVSpec, num_slots: int, capacity: int) -> None:
        dtype = NUMPY_DTYPES[kv.dtype]
        shapes = [(num_slots, x.num_kv_heads, capacity, x.head_dim) for x in kv.layers]
        try:
            self._keys = [_Mapped.zeros(shape, dtype) for shape in shapes]
            self._values = [_Mapped.zeros(shape, dtype) for shape in shapes]
        except (OSError, MemoryError, ValueError, OverflowError) as error:
            size = num_slots * capacity * kv.bytes_per_token
            raise UsageError(
                f"the KV pool of {num_slots} slots x {capacity} tokens needs {size / 2**30:.1f} "
                f"GiB of address space ({error}); lower max_num_seqs or max_model_len"
            ) from error
        self.num_slots = num_slots
        self.capacity = capacity

    @property
    def keys(self) -> tuple[Array, ...]:
        return tuple(x.array for x in self._keys)

    @property
    def values(self) -> tuple[Array, ...]:
        return tuple(x.array for x in self._values)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` over slot `target`."""
        self._check(source, length)
        self._check(target, length)
        for mapped in (*self._keys, *self._values):
            mapped.array[target, :, :length] = mapped.array[source, :, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` tokens of two slots."""
        self._check(a, length)
        self._check(b, length)
        for mapped in (*self._keys, *self._values):
            kept = mapped.array[a, :, :length].copy()
            mapped.array[a, :, :length] = mapped.array[b, :, :length]
            mapped.array[b, :, :length] = kept

    def read(self, slot: int, spans: Sequence[tuple[int, int]]) -> list[KVBlock]:
        """Copies of the token ranges [start, stop) of a slot."""
        for start, stop in spans:
            self._check(slot, start)
            self._check(slot, stop)
        return [
            KVBlock(
                keys=tuple(x.array[slot, :, start:stop].copy() for x in self._keys),
                values=tuple(x.array[slot, :, start:stop].copy() for x in self._values),
            )
            for start, stop in spans
        ]

    def write(self, slot: int, start: int, blocks: Sequence[KVBlock]) -> None:
        """Put blocks one after the other into the slot, from token `start` on."""
        self._check(slot, start + sum(b.num_tokens for b in blocks))
        for block in blocks:
            stop = start + block.num_tokens
            for mapped, source in zip(self._keys, block.keys, strict=True):
                mapped.array[slot, :, start:stop] = source
            for mapped, source in zip(self._values, block.values, strict=True):
                mapped.array[slot, :, start:stop] = source
            start = stop

    def release(self, slot: int) -> None:
        """The slot's content may be lost from now on."""
        self._check(slot, 0)
        for mapped in (*self._keys, *self._values):
            mapped.release(slot)

    def close(self) -> None:
        """Drop the arrays; the pages go back when the last view of them is gone."""
        self._keys, self._values = [], []

    def _check(self, slot: int, tokens: int) -> None:
        if not (0 <= slot < self.num_slots and 0 <= tokens <= self.capacity):
            raise IndexError(
                f"slot {slot}, {tokens} tokens; the pool has {self.num_slots} slots "
                f"of {self.capacity} tokens"
            )
