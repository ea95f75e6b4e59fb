"""Which sizes a plan is built for: its optimization profiles, from the contract table of a graph.

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
    """The profiles of a graph that has a plan of its own: one, with a range for each dimension that
    the graph does not fix, under the name that it has there."""
    return (_chunks(graph, limits) if graph.is_multi_token else _steps(graph, limits),)


def profiles_of_single(graph: GraphSpec, limits: EngineLimits) -> tuple[Profile, ...]:
    """The profiles of an extend graph that runs all phases: decode steps first, then all else.

    TensorRT-RTX orders weights anew for a profile of exactly one row and keeps both orders in a
    plan that has another one too, so none is of one row alone (measured: decision 0011).
    """
    return _steps(graph, limits, least_rows=2), _chunks(graph, limits, least_rows=2)


def most_logits(ladder: tuple[Profile, ...]) -> int:
    """The most logits of a run: rows times logits a row, in the largest of the boxes."""

    def most(profile: Profile, name: str) -> int:
        found = profile.range_of(name)
        return 1 if found is None else found.max

    return max(most(p, "batch") * most(p, "num_logits") for p in ladder)


def _steps(graph: GraphSpec, limits: EngineLimits, least_rows: int = 1) -> Profile:
    """One token and one logit a row. least_rows: the range goes at least that far."""
    rows = max(limits.max_num_seqs, least_rows)
    return _profile(graph, (limits.max_num_seqs, rows), 1, 1)


def _chunks(graph: GraphSpec, limits: EngineLimits, least_rows: int = 1) -> Profile:
    """Several tokens a row."""
    rows, tokens = max(min(limits.max_num_seqs, CHUNK_ROWS), least_rows), limits.max_chunk
    return _profile(graph, (1, rows), tokens, min(tokens, CHUNK_LOGITS))


def _profile(graph: GraphSpec, rows: tuple[int, int], tokens: int, wanted: int) -> Profile:
    """rows: the best and the most; tokens: the most, and the best; wanted: the most logits."""
    (batch, seq), indices = graph.by_role("input_ids")[0].shape, graph.by_role("logits_indices")
    ranges = [(batch, *rows), (seq, tokens, tokens)]
    ranges += [(indices[0].shape[1], 1, wanted)] if indices else []
    dims = (DimRange(d, 1, opt, most) for d, opt, most in ranges if isinstance(d, str))
    return Profile(tuple(dims))
