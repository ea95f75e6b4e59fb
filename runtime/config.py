"""The engine's limits: how many sequences, how many tokens a step, how much KV."""

from dataclasses import dataclass
from typing import Literal, get_args

from trtllm_lite.runtime.errors import UsageError

_LOWEST = {
    "max_num_seqs": 1,
    "max_model_len": 2,
    "max_num_batched_tokens": 1,
    "max_kv_tokens": 2,
    "prefix_cache_bytes": 0,
    "block_size": 1,
    "max_draft_tokens": 1,
}
Speculation = Literal["off", "ngram"]

MAX_DRAFT_TOKENS = 16
"""Kernels may choose their roundings by the number of tokens of a row, and do not change them up to
here: a checked draft gives the tokens that single steps give."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine. Raises UsageError that names the field.

    max_num_seqs: slots, the most sequences that run at once.
    max_model_len: most tokens of one sequence, prompt included.
    max_num_batched_tokens: token budget of a step, decode rows included, which the last tokens of a
        prompt may pass by a sixteenth; also the largest chunk.
    max_kv_tokens: tokens over all running sequences; past it the youngest are preempted.
    enable_prefix_caching: keep computed blocks of `block_size` tokens and reuse them.
    prefix_cache_bytes: most bytes of blocks kept; 0 keeps none.
    speculation: whether requests that do not say get drafts, by "ngram" lookup in their own text.
    max_draft_tokens: most tokens of a draft, at most MAX_DRAFT_TOKENS.
    check_invariants: after every step raise RuntimeError when the books are wrong.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_kv_tokens: int
    enable_prefix_caching: bool = True
    prefix_cache_bytes: int = 512 * 2**20
    block_size: int = 32
    speculation: Speculation = "off"
    max_draft_tokens: int = MAX_DRAFT_TOKENS
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise UsageError(f"{name}: got {value!r}; allowed: integers from {lowest}")
        if self.max_draft_tokens > MAX_DRAFT_TOKENS:
            allowed = f"integers from 1 to {MAX_DRAFT_TOKENS}"
            raise UsageError(f"max_draft_tokens: got {self.max_draft_tokens}; allowed: {allowed}")
        if self.speculation not in get_args(Speculation):
            allowed = ", ".join(map(repr, get_args(Speculation)))
            raise UsageError(f"speculation: got {self.speculation!r}; allowed: {allowed}")

    @property
    def capacity(self) -> int:
        """Tokens that a slot must hold: the longest sequence and the padding of its last chunk."""
        return self.max_model_len + self.max_num_batched_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens of one sequence that can run alone."""
        return min(self.max_model_len, self.max_kv_tokens)

    @property
    def store_bytes(self) -> int:
        """Bytes of blocks that may be kept."""
        return self.prefix_cache_bytes if self.enable_prefix_caching else 0
