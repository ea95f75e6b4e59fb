"""What a caller gets back. Fields are named as vLLM names them."""

from dataclasses import dataclass, field

from trtllm_lite.runtime.request import FinishReason


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token under the raw model distribution, its rank (1 is the most
    likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one sequence, or its end without a token (abort, error).

    `logprobs` maps token id -> (logprob, rank); the chosen token is always in it, first.
    `prompt_logprobs` comes with the first token of choice 0 when asked for: one entry per prompt
    token, the first None. `first_scheduled_time` is when the sequence first got a slot, monotonic
    seconds; None if it never did. `draft_tokens` and `accepted_tokens` count over the
    sequence so far: tokens guessed and checked, and those of them that were right.
    """

    request_id: str
    index: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: dict[int, tuple[float, int]] | None = None
    prompt_logprobs: list[dict[int, tuple[float, int]] | None] | None = None
    cached_tokens: int = 0
    first_scheduled_time: float | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds on the monotonic clock; None until they have happened.

    ttft: arrival to first token. tpot: mean time per output token after the first. queue_time:
    arrival to first admission into a slot. num_generation_tokens: of the longest choice.
    num_draft_tokens: guessed and checked by speculation; num_accepted_tokens: those of them that
    were right; both over all choices.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        if self.finished_time is None or self.first_token_time is None:
            return None
        if self.num_generation_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_generation_tokens - 1)

    @property
    def queue_time(self) -> float | None:
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. `text` is all text so far; `delta` is what is new since the last result."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    delta: str = ""
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The state of one request: complete when `finished`, a snapshot while streaming."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(default=None)
