"""Which sizes a plan is built for: its optimization profile, from the contract table of a graph.

Everything is derived from names of dimensions in the table and three limits. A profile is a box of
sizes, and memory is taken for its far corner: where a row has several tokens, few rows run at once,
because attention over the cache needs memory for the whole cache of each row (it is copied for all
query heads), and because products of many tokens gain nothing from more rows. Whoever runs a plan
splits what is larger.
"""

from dataclasses import dataclass

from trtllm_lite.runtime.config import MAX_DRAFT_TOKENS
from trtllm_lite.runtime.engines.record import DimRange, Profile
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.manifest import GraphSpec, Limits

CHUNK_ROWS = 4
"""Most rows of a run where a row has several tokens."""
CHUNK_LOGITS = 32
"""Most logits of a row in a run; a checked draft needs MAX_DRAFT_TOKENS + 1."""
CHUNK = 512
"""Most tokens of a step, where nobody says."""
_PASSED_BY = 16
"""The last tokens of a prompt may pass the budget of a step by this part of it."""
CAPACITY_STEP = 64


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the engine that plans are built for; as in `EngineConfig`."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def capacity(self) -> int:
        """Tokens of a KV slot: the longest sequence and the padding of a chunk, rounded up."""
        least = self.max_model_len + self.max_num_batched_tokens
        return -(-least // CAPACITY_STEP) * CAPACITY_STEP

    @property
    def max_chunk(self) -> int:
        """Most tokens of one row in one step."""
        budget = self.max_num_batched_tokens
        return max(budget + budget // _PASSED_BY, MAX_DRAFT_TOKENS + 1)


def engine_limits(
    bundle: Limits,
    max_num_seqs: int | None,
    max_model_len: int | None,
    max_num_batched_tokens: int | None,
) -> EngineLimits:
    """What was asked for, or what the bundle was made for. Raises UsageError for more than that."""
    for name, asked, most in (
        ("--max-num-seqs", max_num_seqs, bundle.max_num_seqs),
        ("--max-model-len", max_model_len, bundle.max_model_len),
    ):
        if asked is not None and asked > most:
            raise UsageError(f"{name}: got {asked}; the bundle was made for at most {most}")
    length = max_model_len or bundle.max_model_len
    chunk = max_num_batched_tokens or min(CHUNK, length)
    return EngineLimits(max_num_seqs or bundle.max_num_seqs, length, chunk)


def capacity_dim(graph: GraphSpec) -> str | None:
    """The name of the dimension that a plan fixes; None where the graph has it fixed already."""
    dim = graph.by_role("past_key")[0].shape[2]
    return dim if isinstance(dim, str) else None


def profiles(graph: GraphSpec, limits: EngineLimits) -> tuple[Profile, ...]:
    """The profiles of one graph: one, with a range for each dimension that the graph does not fix,
    under the name that it has there."""
    rows, tokens, wanted = limits.max_num_seqs, 1, 1
    opt_rows = rows
    if graph.is_multi_token:
        rows, opt_rows = min(rows, CHUNK_ROWS), 1
        tokens, wanted = limits.max_chunk, min(limits.max_chunk, CHUNK_LOGITS)
    (batch, seq), indices = graph.by_role("input_ids")[0].shape, graph.by_role("logits_indices")
    ranges = [(batch, opt_rows, rows), (seq, tokens, tokens)]
    ranges += [(indices[0].shape[1], 1, wanted)] if indices else []
    dims = (DimRange(d, 1, opt, most) for d, opt, most in ranges if isinstance(d, str))
    return (Profile(tuple(dims)),)
