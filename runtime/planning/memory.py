"""What lies in a machine's memory while a model runs, and how many requests fit."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtllm_lite.runtime.manifest import Phase

CONTEXT_BYTES = 700 * 2**20
"""Estimate: a process's CUDA context with the libraries' code."""
HOST_BYTES = 3 * 2**30
"""Estimate: a Jetson's system and a process, where GPU and host share the memory."""
DECODE_SCRATCH_BYTES = 8 * 2**20
"""Of TensorRT's attention over the cache for one token a row; it does not grow with the cache."""
LONGEST_SLOT = 24_575
"""Tokens of the longest slot that TensorRT has a kernel for with one token a row (TensorRT-RTX
1.7.1); of longer ones it makes a copy, as it does for several tokens a row."""
BUILD_BASE_BYTES = 240 * 2**20
BUILD_LAYER_BYTES = 13 * 2**20
BUILD_COPIES = 3
"""Estimates: of the process that builds plans with TensorRT-RTX 1.7.1, of each layer, and of the
weights: as parsed, in the layouts that it chose, and in the plan."""


@dataclass(frozen=True)
class GraphWeights:
    """Bytes that graphs name in their weights file, each place once a graph. vectors: those of the
    tensors with one dimension; the rest is matrices. all_matrices: once over all graphs."""

    vectors: Mapping[Phase, int]
    matrices: Mapping[Phase, int]
    all_matrices: int

    def of(self, phase: Phase) -> int:
        """All of one graph."""
        return self.vectors[phase] + self.matrices[phase]

    @property
    def largest(self) -> int:
        """Of the graph with the most."""
        return max(map(self.of, self.matrices))


@dataclass(frozen=True)
class Ledger:
    """Bytes by what they are for; `total_bytes` is what there is. slot_bytes: the KV cache of one
    request at its longest. slots: requests that were asked for."""

    total_bytes: int
    reserved_bytes: int
    weight_bytes: int
    scratch_bytes: int
    slot_bytes: int
    slots: int

    @property
    def kv_bytes(self) -> int:
        return self.slot_bytes * self.slots

    @property
    def used_bytes(self) -> int:
        """All of it, with as many requests as were asked for."""
        return self.reserved_bytes + self.weight_bytes + self.scratch_bytes + self.kv_bytes

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.total_bytes

    @property
    def most_slots(self) -> int:
        """The largest number of requests whose caches fit beside the rest; 0 when none does."""
        left = self.total_bytes - self.reserved_bytes - self.weight_bytes - self.scratch_bytes
        return max(0, left // max(1, self.slot_bytes))


def run_scratch_bytes(tokens: int, width: int, element_bytes: int) -> int:
    """Estimate of what a run of `tokens` tokens keeps between operators: the widest layer's output,
    and what is made of it."""
    return 2 * tokens * width * element_bytes


def decode_scratch_bytes(rows: int, capacity: int, query_width: int, element_bytes: int) -> int:
    """Of TensorRT's attention of one token a row over the cache."""
    if capacity <= LONGEST_SLOT:
        return DECODE_SCRATCH_BYTES
    return extend_scratch_bytes(rows, capacity, query_width, element_bytes)


def extend_scratch_bytes(rows: int, capacity: int, query_width: int, element_bytes: int) -> int:
    """Of TensorRT's attention of several tokens a row over the cache, which it spreads to all query
    heads first; one layer's at a time. query_width: query heads times head size."""
    return 2 * rows * capacity * query_width * element_bytes


@dataclass(frozen=True)
class PlanRun:
    """The largest run of a plan of TensorRT, and what it keeps between and inside of its layers,
    which take turns: estimates, held by a test against what TensorRT-RTX 1.7.1 reported.

    rows, tokens: over all rows. capacity: tokens of a slot. logit_bytes: of its float32 logits.
    hidden, query_width, width: values of a token between layers, in all query heads, and in the
    widest layer's output. element_bytes: of the arithmetic.
    """

    rows: int
    tokens: int
    capacity: int
    logit_bytes: int
    hidden: int
    query_width: int
    width: int
    element_bytes: int

    @property
    def decode_bytes(self) -> int:
        """Of one token a row: its logits are there in `element_bytes` before they are float32."""
        attending = decode_scratch_bytes(
            self.rows, self.capacity, self.query_width, self.element_bytes
        )
        return attending + self.logit_bytes * self.element_bytes // 4

    @property
    def prefill_bytes(self) -> int:
        """Of a prompt over its own K and V: its widest layer, or its logits."""
        widest = run_scratch_bytes(self.tokens, self.width, self.element_bytes)
        return max(widest, self.logit_bytes + 2 * self._hidden_bytes)

    @property
    def extend_bytes(self) -> int:
        """Of several tokens a row over the cache."""
        over_cache = extend_scratch_bytes(
            self.rows, self.capacity, self.query_width, self.element_bytes
        )
        return max(self.prefill_bytes, over_cache + 4 * self._hidden_bytes)

    @property
    def _hidden_bytes(self) -> int:
        return self.tokens * self.hidden * self.element_bytes


def build_bytes(weight_bytes: int, layers: int) -> int:
    """Estimate of the host's memory to build plans, one after the other. weight_bytes: of the graph
    with the most."""
    return BUILD_BASE_BYTES + BUILD_LAYER_BYTES * layers + BUILD_COPIES * weight_bytes
