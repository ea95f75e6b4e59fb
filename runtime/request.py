"""What a caller asks for (frozen), and the engine's record of one choice of it.

`Request` never changes after it is made. `Sequence` is mutated by the scheduler alone:
`num_computed_tokens` catches up with `len(token_ids)`, so there is no separate prefill mode
(the idea of vLLM's v1 scheduler).
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from trtllm_lite.runtime.grammar import Grammar
from trtllm_lite.runtime.sampling_params import SamplingParams

__all__ = ["FinishReason", "Request", "SamplingParams", "Sequence", "Status"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Request:
    """One prompt and its parameters. `arrival_time` is time.monotonic() at submission, seconds;
    `grammar` is that of the parameters, compiled."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float = 0.0
    grammar: Grammar | None = None


class Status(Enum):
    """WAITING has no slot; RUNNING has one; FINISHED has left for good."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One choice (`index` of `n`) of a request. Only the scheduler writes to it.

    Invariants: 0 <= num_computed_tokens <= len(token_ids); slot is set exactly while RUNNING;
    num_cached_tokens counts prompt tokens taken from the block store at the last admission;
    num_draft_tokens those that were guessed and checked, num_accepted_tokens those that were right.
    """

    request: Request
    index: int
    token_ids: list[int]
    max_length: int
    """Tokens, prompt included, at which the sequence ends with "length"."""
    status: Status = Status.WAITING
    slot: int | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    first_scheduled_time: float | None = None
    """When it was first given a slot, seconds on the monotonic clock."""

    @property
    def id(self) -> str:
        return f"{self.request.id}/{self.index}"

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the newest token is left to compute, and it was generated: the row belongs to the
        decode graph. A prompt's last token belongs to its prompt."""
        return self.num_uncomputed_tokens == 1 and self.num_generated_tokens > 0
