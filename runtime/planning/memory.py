"""What lies in a machine's memory while a model runs, and how many requests fit."""

from dataclasses import dataclass

CONTEXT_BYTES = 700 * 2**20
"""Estimate: a process's CUDA context with the libraries' code."""
HOST_BYTES = 3 * 2**30
"""Estimate: a Jetson's system and a process, where GPU and host share the memory."""
DECODE_SCRATCH_BYTES = 8 * 2**20
"""Of TensorRT's attention over the cache for one token a row; it does not grow with the cache."""


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


def run_scratch_bytes(
    tokens: int, rows: int, width: int, hidden: int, vocab_size: int, element_bytes: int
) -> int:
    """Estimate of what a run of `tokens` tokens in `rows` rows keeps between operators: a few
    hidden states, the widest layer's output twice, and float32 logits."""
    return tokens * (4 * hidden + 2 * width) * element_bytes + 4 * rows * vocab_size


def extend_scratch_bytes(rows: int, capacity: int, query_width: int, element_bytes: int) -> int:
    """Of TensorRT's attention of several tokens a row over the cache, which it spreads to all query
    heads first; one layer's at a time. query_width: query heads times head size."""
    return 2 * rows * capacity * query_width * element_bytes
