"""The seam between the engine and whatever runs a graph.

The engine decides (slots, lengths, what runs); a session owns the memory of the KV pool and the
graphs, and does what it is told. A new backend is one file that implements `Session` and one line
in `backends/__init__.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.host_cache import HostCache
from trtllm_lite.runtime.kv_dtype import KVChoice
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.native_table import Rounding
from trtllm_lite.runtime.progress import NoProgress, Progress

Array = npt.NDArray[Any]
Spin = Literal["off", "brief", "long"]
"""How threads wait for their next piece of work: asleep; at full speed between two operators; at
full speed between two steps too."""


KernelChoice = Literal["auto", "native", "onnxruntime"]
"""Whose operators run a quantized bundle: ours where they can, ours or an error, ONNX Runtime's."""


@dataclass(frozen=True)
class SessionOptions:
    """What a session is opened with.

    `capacity` is the tokens a slot holds, padding of the last chunk included, so it is at least
    max_model_len + the largest chunk - 1. `intra_op_num_threads` None lets the backend choose.
    `huge_pages` True keeps a private copy of the weights in huge pages, False never asks for any;
    None asks for them only where the weights are private anyway. `host_cache` is where files that
    are made once per machine lie; None makes none. `phases`: the graphs to open; a run of another
    one fails. `kernels`: whose operators run; ours need a host cache.
    `rounding`: of the activations of few tokens by our kernels; ONNX Runtime's are as "fast".
    `kv_dtype`: of the cache; "auto" is what the bundle was made for, where the kernels can.
    """

    num_slots: int
    capacity: int
    intra_op_num_threads: int | None = None
    spin: Spin = "brief"
    huge_pages: bool | None = None
    host_cache: HostCache | None = None
    phases: tuple[Phase, ...] = ("prefill", "decode")
    kernels: KernelChoice = "auto"
    rounding: Rounding = "fast"
    kv_dtype: KVChoice = "auto"
    progress: Progress = field(default_factory=NoProgress)


@dataclass(frozen=True)
class DecodeCost:
    """How the time of a decode run grows with its tokens, those of all rows and padding together.

    Reading the weights hides the arithmetic of the first `free` tokens; each further one adds
    `per_token` of the time of a run of one token.
    """

    per_token: float = 0.2
    free: float = 1.0

    def of(self, tokens: int) -> float:
        """The time of a run, in runs of one token."""
        return max(1.0, 1.0 + self.per_token * (tokens - self.free))


@dataclass(frozen=True)
class SessionInfo:
    """What was opened: backend and device names, threads in use, bytes of KV per token.

    `multi_token_decode`: whether decode batches may hold several tokens a row; `decode_cost`: what
    those cost.
    `shape_invariant`: a row's logits are the same, but for the rounding of float32, however many
    rows and tokens are in the run.
    `weights`: "mapped" from files that other sessions and processes share, or "private".
    `huge_page_bytes`: private memory in huge pages. `kernels`: whose operators multiply by
    quantized weights. `kv_dtype`: of the cache, which `kv_bytes_per_token` are of.
    `top_logits`: of how many of the largest logits a batch may ask for those alone, 0 of none.
    `kv_reserved`: all slots have their memory already, which is not the host's.
    """

    backend: str
    device: str
    intra_op_num_threads: int
    kv_bytes_per_token: int
    multi_token_decode: bool = False
    decode_cost: DecodeCost = field(default_factory=DecodeCost)
    shape_invariant: bool = False
    spin: Spin = "brief"
    weights: Literal["mapped", "private"] = "private"
    huge_page_bytes: int = 0
    kernels: Literal["native", "onnxruntime", "tensorrt"] = "onnxruntime"
    kv_dtype: str = "float32"
    kv_reserved: bool = False
    top_logits: int = 0


@dataclass(frozen=True)
class Batch:
    """One run of one graph over the consecutive slots first_slot .. first_slot + rows - 1.

    token_ids [rows, seq] int64, right-padded; past_lens, query_lens, context_lens [rows] int32;
    logits_indices [rows, num_logits] int64, positions inside the chunk. Both phases are alike in
    this; where a session has no `multi_token_decode`, decode has seq == 1 and num_logits == 1.
    candidates: that many of the largest logits of each row are all that matters; others may come
    back as -inf. 0: all matter.
    """

    phase: Phase
    first_slot: int
    token_ids: Array
    past_lens: Array
    query_lens: Array
    context_lens: Array
    logits_indices: Array
    candidates: int = 0

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

    def interrupt(self) -> None:
        """From any thread, without waiting: the prefill run that is going on, if there is one, may
        be given up, and then raises RunInterruptedError. Slots hold what they held up to the
        batch's past_lens; the session goes on."""

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
