"""The KV pool in device memory: one allocation, per layer an array for K and one for V.

It owns the bytes and nothing else: which slot holds what is the engine's business. Every array is
[num_slots, kv_heads, capacity, head_dim], so the consecutive slots from `first_slot` on are an
array of their own, which begins at `address(..., first_slot)`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from trtllm_lite.runtime.backends.base import Array, KVBlock
from trtllm_lite.runtime.backends.device import ALIGNMENT, Device, DeviceMemoryError, HostBuffer
from trtllm_lite.runtime.backends.kv_pool import NUMPY_DTYPES
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.manifest import KVSpec

STAGING_BYTES = 64 * 2**20
"""Pinned memory through which blocks pass, where one block is not larger."""

Span = tuple[int, int]


@dataclass(frozen=True)
class _Part:
    """K or V of one layer: where it begins in the allocation, and its sizes in bytes."""

    offset: int
    heads: int
    token: int
    """Of one token of one head."""
    row: int
    """Of all tokens of one head of one slot."""

    @property
    def slot(self) -> int:
        return self.heads * self.row


class DevicePool:
    """`num_slots` slots of `capacity` tokens. Everything is queued but what the host waits for.

    The memory begins as zeros, since what lies beyond a row's tokens has to be finite. Raises
    UsageError, which ends with the `remedy`, when it cannot be had, IndexError for a place outside
    of the pool.
    """

    def __init__(
        self,
        device: Device,
        kv: KVSpec,
        num_slots: int,
        capacity: int,
        remedy: str = "lower max_num_seqs or max_model_len",
    ) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        self._device = device
        self._kv = kv
        self._parts = tuple(_parts(kv, num_slots, capacity))
        last = self._parts[-1]
        self.nbytes = last.offset + num_slots * last.slot
        self._remedy = remedy
        self._base = self._allocate(self.nbytes)
        self._staging: HostBuffer | None = None
        self._spare: int | None = None
        """Of one slot of the largest part, for swaps: a GPU that is full later has none left."""
        if num_slots > 1:
            self._spare = self._allocate(max(part.slot for part in self._parts))
        device.fill_zero(self._base, self.nbytes)

    def keys(self, first_slot: int) -> list[int]:
        """The address of K from a slot on, layer by layer."""
        return [self._address(part, first_slot) for part in self._parts[::2]]

    def values(self, first_slot: int) -> list[int]:
        return [self._address(part, first_slot) for part in self._parts[1::2]]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` over slot `target`."""
        self._check(source, length)
        self._check(target, length)
        if source == target or not length:
            return
        for part in self._parts:
            here, there = self._address(part, target), self._address(part, source)
            self._copy(part, here, part.row, there, part.row, length)

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` tokens of two slots."""
        self._check(a, length)
        self._check(b, length)
        if a == b or not length or self._spare is None:
            return
        for part in self._parts:
            first, second = self._address(part, a), self._address(part, b)
            self._copy(part, self._spare, part.row, first, part.row, length)
            self._copy(part, first, part.row, second, part.row, length)
            self._copy(part, second, part.row, self._spare, part.row, length)

    def read(self, slot: int, spans: Sequence[Span]) -> list[KVBlock]:
        """Copies of the token ranges [start, stop) of a slot."""
        for start, stop in spans:
            self._check(slot, start)
            self._check(slot, stop)
        return [block for group in self._groups(spans) for block in self._read(slot, group)]

    def write(self, slot: int, start: int, blocks: Sequence[KVBlock]) -> None:
        """Put blocks one after the other into the slot, from token `start` on."""
        self._check(slot, start + sum(b.num_tokens for b in blocks))
        ends = accumulate((b.num_tokens for b in blocks), initial=start)
        done = 0
        for group in self._groups(list(pairwise(ends))):
            self._write(slot, group[0][0], blocks[done : done + len(group)])
            done += len(group)

    def close(self) -> None:
        """Give the memory back. Nothing else may be called afterwards."""
        kept = (self._base, self._spare, self._staging.address if self._staging else None)
        for address in kept:
            if address is not None:
                self._device.free(address)
        self._spare, self._staging = None, None

    def _allocate(self, nbytes: int) -> int:
        try:
            return self._device.allocate(nbytes)
        except DeviceMemoryError as error:
            free, total = (x / 2**30 for x in self._device.memory())
            raise UsageError(
                f"the KV pool of {self.num_slots} slots x {self.capacity} tokens needs "
                f"{self.nbytes / 2**30:.1f} GiB; {self._device.name} has {free:.1f} of {total:.1f} "
                f"GiB free; {self._remedy}"
            ) from error

    def _address(self, part: _Part, slot: int, token: int = 0) -> int:
        return self._base + part.offset + slot * part.slot + token * part.token

    def _copy(
        self, part: _Part, target: int, to_pitch: int, source: int, from_pitch: int, length: int
    ) -> None:
        """Of `length` tokens of all heads."""
        width = length * part.token
        self._device.copy_rows(target, to_pitch, source, from_pitch, width, part.heads)

    def _groups(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Runs of adjoining spans that fit into the staging memory together."""
        most = STAGING_BYTES // self._kv.bytes_per_token
        group: list[Span] = []
        for start, stop in spans:
            if group and (start != group[-1][1] or stop - group[0][0] > most):
                yield group
                group = []
            group.append((start, stop))
        if group:
            yield group

    def _read(self, slot: int, spans: Sequence[Span]) -> Iterator[KVBlock]:
        first, length = spans[0][0], spans[-1][1] - spans[0][0]
        if not length:
            yield from (self._blocks(0, [(0, 0)]) * len(spans))
            return
        staging = self._staging_of(length)
        for part, place in zip(self._parts, self._places(length), strict=True):
            source, width = self._address(part, slot, first), length * part.token
            self._copy(part, staging.address + place, width, source, part.row, length)
        self._device.synchronize()
        yield from self._blocks(length, [(a - first, b - first) for a, b in spans])

    def _blocks(self, length: int, spans: Sequence[Span]) -> list[KVBlock]:
        """Copies of what lies in the staging memory."""
        arrays = self._staged(length)
        return [
            KVBlock(
                tuple(x[:, start:stop].copy() for x in arrays[::2]),
                tuple(x[:, start:stop].copy() for x in arrays[1::2]),
            )
            for start, stop in spans
        ]

    def _write(self, slot: int, start: int, blocks: Sequence[KVBlock]) -> None:
        length = sum(b.num_tokens for b in blocks)
        if not length:
            return
        staging, at = self._staging_of(length), 0
        arrays = self._staged(length)
        for block in blocks:
            sources = (x for pair in zip(block.keys, block.values, strict=True) for x in pair)
            for array, source in zip(arrays, sources, strict=True):
                array[:, at : at + block.num_tokens] = source
            at += block.num_tokens
        for part, place in zip(self._parts, self._places(length), strict=True):
            target, width = self._address(part, slot, start), length * part.token
            self._copy(part, target, part.row, staging.address + place, width, length)
        # The next user of the staging memory does not have to know of this one.
        self._device.synchronize()

    def _staging_of(self, length: int) -> HostBuffer:
        needed = length * self._kv.bytes_per_token
        if self._staging is None or self._staging.nbytes < needed:
            if self._staging is not None:
                self._device.free(self._staging.address)
                self._staging = None
            self._staging = self._device.allocate_host(needed)
        return self._staging

    def _places(self, length: int) -> list[int]:
        """Where each part begins in the staging memory."""
        sizes = [part.heads * part.token * length for part in self._parts]
        return list(accumulate(sizes[:-1], initial=0))

    def _staged(self, length: int) -> list[Array]:
        """The staging memory as arrays [kv_heads, length, head_dim], K and V of each layer."""
        dtype = NUMPY_DTYPES[self._kv.dtype]
        data = self._staging_of(length).array
        shapes = [(x.num_kv_heads, length, x.head_dim) for x in self._kv.layers for _ in "kv"]
        places = self._places(length)
        return [
            data[place : place + part.heads * part.token * length].view(dtype).reshape(shape)
            for part, place, shape in zip(self._parts, places, shapes, strict=True)
        ]

    def _check(self, slot: int, tokens: int) -> None:
        if not (0 <= slot < self.num_slots and 0 <= tokens <= self.capacity):
            raise IndexError(
                f"slot {slot}, {tokens} tokens; the pool has {self.num_slots} slots "
                f"of {self.capacity} tokens"
            )


def _parts(kv: KVSpec, num_slots: int, capacity: int) -> Iterator[_Part]:
    """Raises UsageError where slots would not begin where a tensor can."""
    itemsize, offset = np.dtype(NUMPY_DTYPES[kv.dtype]).itemsize, 0
    for layer in kv.layers:
        token = layer.head_dim * itemsize
        for _ in "kv":
            part = _Part(offset, layer.num_kv_heads, token, capacity * token)
            if part.slot % ALIGNMENT and num_slots > 1:
                raise UsageError(
                    f"the plans have slots of {capacity} tokens, {part.slot} bytes a layer; they "
                    f"have to be a multiple of {ALIGNMENT} bytes; build plans for another "
                    "--max-model-len"
                )
            yield part
            offset += -(-num_slots * part.slot // ALIGNMENT) * ALIGNMENT
