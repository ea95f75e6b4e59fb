"""What one step does, and what came of it, as frozen values."""

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.request import Sequence
from trtllm_lite.runtime.sampler import Sampled
from trtllm_lite.runtime.transfers import Transfer

PromptLogprobs = list[dict[int, tuple[float, int]] | None]


@dataclass(frozen=True)
class PlanRow:
    """One sequence's share of a step: tokens start .. start + num_tokens - 1, run in `slot`.

    The last of them are `draft`, guesses that this step checks: not tokens of the sequence yet.
    `context_len` is its length with them when the step was planned; `all_logits` asks for the
    logits of every token of the chunk, not only of the last. `decoded`: the tokens were made by the
    decode graph, lost their slot, and are computed again as they were made.
    """

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int
    context_len: int
    all_logits: bool = False
    draft: tuple[int, ...] = ()
    decoded: bool = False

    @property
    def samples(self) -> bool:
        """The chunk reaches the newest token: at least one new one will be chosen."""
        return self.start + self.num_tokens == self.context_len

    @property
    def token_ids(self) -> list[int]:
        known = self.sequence.token_ids[self.start : self.start + self.num_tokens]
        return [*known, *self.draft] if self.draft else known


@dataclass(frozen=True)
class StepPlan:
    """One step: transfers first, then the decode rows (slots 0, 1, ...), then the prefill rows
    (oldest sequence first)."""

    transfers: tuple[Transfer, ...]
    decode: tuple[PlanRow, ...]
    prefill: tuple[PlanRow, ...]

    @property
    def rows(self) -> Iterator[PlanRow]:
        yield from self.decode
        yield from self.prefill

    def rows_of(self, batch: Batch) -> Ordered[PlanRow]:
        """The rows that a batch of this plan runs, in its order."""
        if self.decode and batch.first_slot == self.decode[0].slot:
            return self.decode
        rows = {row.slot: row for row in self.prefill}
        return [rows[batch.first_slot + i] for i in range(batch.rows)]


@dataclass(frozen=True)
class Outcome:
    """What came of a row: tokens, nothing yet (its prefill goes on), or what went wrong.

    `sampled` are the accepted tokens of its draft and the one chosen behind them. With an `error`
    they are what was chosen before it. `given_up`: the row was not computed.
    """

    sampled: tuple[Sampled, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    given_up: bool = False


@dataclass(frozen=True)
class Applied:
    """What a change of the books tells the caller, and what the memory has to do for it."""

    events: tuple[TokenEvent, ...]
    transfers: tuple[Transfer, ...]
