"""The bundle's manifest as frozen values: what a graph looks like from outside, and its limits.

One table of `TensorSpec` per graph is the contract: input names, dynamic shapes, checks, docs and
memory sizes are derived from it, so nothing downstream asks which model it serves. This file knows
nothing of files on disk (see `bundle.py`) and nothing of how a graph is made.

Contract of the graphs (all targets):

* `input_ids` int64 [batch, seq]: right-padded rows.
* `past_lens` int32 [batch]: tokens of the row already in the cache.
* `query_lens` int32 [batch]: valid tokens of the row, 1..seq.
* `context_lens` int32 [batch] (only where `kv.recompute_at` is set): tokens that the row will hold
  when its present prefill is done; it selects the rope regime of the whole row.
* `max_total_len` int32 [1] (only of target "cuda", in host memory): at least the largest past_lens
  + query_lens of the run, and exactly that where seq > 1; see below.
* `logits_indices` int64 [batch, num_logits]: positions inside the chunk whose logits are wanted;
  normally the one last valid token.
* `past_key_<i>` / `past_value_<i>` [batch, kv_heads, capacity, head_dim]; `present_*` have the same
  shape and are meant to be bound to the same memory. Needs past_lens + seq <= capacity for every
  row, padding included. Nothing at or beyond past_lens + query_lens is written; values there,
  NaN included, never reach a result.
* `logits` float32 [batch, num_logits, vocab].
* `top_logits` float32 and `top_ids` int64 [batch, num_logits, candidates] (only of target "cuda"):
  the largest of the logits, falling, and the tokens that they are of.

The two graphs have the same table; they differ in the formats of their weights. A decode graph may
also leave out `query_lens` and `logits_indices`: it then takes seq == 1 and gives num_logits == 1.

A bundle may have a third graph, of phase "extend", with the table of prefill. Its prefill graph
then attends over the tokens of its own run alone, so every row of a run has past_lens == 0; extend
takes all that prefill and decode cannot: the next chunk of a prompt, tokens after a kept prefix,
several tokens a row. All three write past_lens .. past_lens + seq - 1, padding included, and what
lies in the cache beyond a row's tokens has to be finite.

Of target "cuda" there are two graphs, the same file twice, so that one session serves both. Their
attention knows no length of the padding. A run with seq > 1 is therefore one of two: all rows
begin (past_lens == 0, right-padded, max_total_len == seq), or there is one row, without padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

FORMAT = "trtllm-lite-bundle"
FORMAT_VERSION = "1.1"
MANIFEST_NAME = "bundle.json"
PARITY_NAME = "parity.json"

Role = Literal[
    "input_ids",
    "past_lens",
    "query_lens",
    "context_lens",
    "max_total_len",
    "logits_indices",
    "past_key",
    "past_value",
    "present_key",
    "present_value",
    "logits",
    "top_logits",
    "top_ids",
]
Phase = Literal["prefill", "decode", "extend"]

MULTI_TOKEN_ROLES: tuple[Role, ...] = ("query_lens", "logits_indices")
"""A decode graph has both of these inputs, or takes one token a row."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output. `shape` mixes fixed sizes and symbolic dimension names."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int | str, ...]
    layer: int | None = None


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX file of the bundle and its inputs and outputs, in graph order."""

    phase: Phase
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def by_role(self, role: Role) -> tuple[TensorSpec, ...]:
        return tuple(t for t in (*self.inputs, *self.outputs) if t.role == role)

    @property
    def is_multi_token(self) -> bool:
        """Whether its table is the one that takes several tokens a row."""
        return any(t.role in MULTI_TOKEN_ROLES for t in self.inputs)


@dataclass(frozen=True)
class KVLayer:
    """The cache of one layer. `sliding_window` counts the tokens that a query sees, itself
    included; None is full attention."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None


@dataclass(frozen=True)
class KVSpec:
    """The KV cache contract. `layout` "slots" is one pool [slots, kv_heads, capacity, head_dim] per
    layer for K and for V, bound in place.

    `recompute_at`: a sequence whose length first exceeds this many tokens must be computed again
    from its first token, because its rope regime changes for every position (longrope).
    """

    dtype: str
    layers: tuple[KVLayer, ...]
    layout: str = "slots"
    recompute_at: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return sum(2 * x.num_kv_heads * x.head_dim for x in self.layers) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Limits:
    """What the graphs were made and proved for."""

    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model that a reader wants; the runtime computes nothing from `model_type`."""

    model_type: str
    architecture: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None = None


@dataclass(frozen=True)
class Source:
    """Where the weights came from. `id` is a folder's or file's name or a hub id, never a path."""

    id: str
    format: Literal["safetensors", "gguf"]
    revision: str | None = None
    license: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle. `path` is relative, with forward slashes, inside the folder."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Quantization:
    """Weight formats; "none" is the plain dtype. For people: what has to be computed is in the
    graphs.

    prefill, decode: of the projections, per phase. embedding, lm_head: of those two, in both
    phases. overrides: projections with a format of their own in both phases, by weight.
    """

    prefill: str = "none"
    decode: str = "none"
    embedding: str = "none"
    lm_head: str = "none"
    overrides: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """All of bundle.json. Written last by the exporter, only read by the runtime.

    float32_values: of the graphs' values, those that stay float32 where `dtype` is float16, because
    they go beyond it. For people: the casts are in the graphs.
    """

    model: ModelFacts
    source: Source
    target: str
    dtype: str
    quantization: Quantization
    limits: Limits
    kv: KVSpec
    graphs: tuple[GraphSpec, ...]
    weights: str
    files: tuple[FileEntry, ...]
    tokenizer: str | None = None
    chat_template: str | None = None
    generation_config: str | None = None
    float32_values: tuple[str, ...] = ()
    producer: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT
    format_version: str = FORMAT_VERSION

    def graph(self, phase: Phase) -> GraphSpec:
        return next(g for g in self.graphs if g.phase == phase)

    def __iter__(self) -> Iterator[GraphSpec]:
        return iter(self.graphs)
