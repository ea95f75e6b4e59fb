"""The seam between the engine and whatever runs a graph.

The engine decides (slots, lengths, what runs); a session owns the memory of the KV pool and the
graphs, and does what it is told. A new backend is one file that implements `Session` and one line
in `backends/__init__.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.manifest import Phase

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SessionOptions:
    """What a session is opened with.

    `capacity` is the tokens a slot holds, padding of the last chunk included, so it is at least
    max_model_len + the largest chunk - 1. `intra_op_num_threads` None lets the backend choose.
    `spin` lets its threads wait for work at full speed for as long as the backend likes.
    """

    num_slots: int
    capacity: int
    intra_op_num_threads: int | None = None
    spin: bool = False


@dataclass(frozen=True)
class SessionInfo:
    """What was opened: backend and device names, threads in use, bytes of KV per token."""

    backend: str
    device: str
    intra_op_num_threads: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Batch:
    """One run of one graph over the consecutive slots first_slot .. first_slot + rows - 1.

    token_ids [rows, seq] int64, right-padded; past_lens, query_lens, context_lens [rows] int32;
    logits_indices [rows, num_logits] int64, positions inside the chunk. In decode seq == 1, every
    query_len is 1 and logits_indices is zero.
    """

    phase: Phase
    first_slot: int
    token_ids: Array
    past_lens: Array
    query_lens: Array
    context_lens: Array
    logits_indices: Array

    @property
    def rows(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True)
class KVBlock:
    """A copy of the K and V of consecutive tokens of one slot: per layer two arrays
    [kv_heads, tokens, head_dim]. Owned by the holder, never a view of the pool."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.keys, *self.values))

    @property
    def num_tokens(self) -> int:
        return int(self.keys[0].shape[1])


class Session(Protocol):
    """An opened bundle: graphs and a KV pool of `num_slots` slots. Not thread-safe."""

    @property
    def info(self) -> SessionInfo: ...

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits [rows, num_logits, vocab] float32. Valid until the next `run`: copy what you keep.
        Writes K and V of the batch's tokens into the slots, in place."""

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` over slot `target`."""

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` tokens of two slots."""

    def read(self, slot: int, spans: Sequence[tuple[int, int]]) -> list[KVBlock]:
        """Copies of the token ranges [start, stop) of a slot, one block a range."""

    def write(self, slot: int, start: int, blocks: Sequence[KVBlock]) -> None:
        """Put blocks one after the other into the slot, from token `start` on."""

    def release(self, slot: int) -> None:
        """The slot's content is not needed any more; its memory may go back to the system."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class Backend(Protocol):
    """Opens sessions for the bundles of its target."""

    def __call__(self, bundle: Bundle, options: SessionOptions) -> Session:
        """Raises BundleError for a bundle of another target or a graph that does not match its
        table, MissingExtraError when its package is not installed."""
