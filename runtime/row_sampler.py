"""From a row's logits to its outcome: samplers of the running sequences, prompt logprobs."""

import math
from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.runtime.plan import Outcome, PlanRow, PromptLogprobs
from trtllm_lite.runtime.request import Sequence
from trtllm_lite.runtime.sampler import (
    Sampled,
    SequenceSampler,
    candidates_needed,
    prompt_logprobs,
)

F32 = npt.NDArray[np.float32]


class RowSampler:
    """One `SequenceSampler` for each sequence, made when its first token is due: a queue of waiting
    sequences costs nothing. Requests come with their seed resolved (`params.seed` is set)."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._samplers: dict[Sequence, SequenceSampler] = {}
        self._prompts: dict[Sequence, PromptLogprobs] = {}

    def take_all(self, rows: Ordered[PlanRow], logits: F32) -> dict[Sequence, Outcome]:
        """The outcomes of the rows of one run; `logits` [rows, num_logits, vocab]."""
        best: list[list[int]] = logits.argmax(axis=-1).tolist()
        whole = logits.shape[2] == self._vocab_size
        outcomes: dict[Sequence, Outcome] = {}
        for i, row in enumerate(rows):
            # A row that has a sampler has its prompt's logprobs behind it.
            sampler = self._samplers.get(row.sequence)
            token = best[i][-1]
            plain = whole and sampler is not None and sampler.takes_best and not row.draft
            if plain and row.samples and math.isfinite(logits.item(i, -1, token)):
                outcomes[row.sequence] = Outcome((Sampled(token, None),))
            else:
                outcomes[row.sequence] = self.take(row, logits[i], best[i])
        return outcomes

    def candidates(self, rows: Ordered[PlanRow]) -> int:
        """How many of the largest logits of each row matter, 0 when all of some row do."""
        most = 1
        for row in rows:
            if row.all_logits:
                return 0
            if row.samples:
                constrained = row.sequence.request.grammar is not None
                needed = candidates_needed(row.sequence.params, constrained=constrained)
                if not needed:
                    return 0
                most = max(most, needed)
        return most

    def take(self, row: PlanRow, logits: F32, best: Ordered[int]) -> Outcome:
        """The outcome of a row that ran. `logits` [num_logits, vocab], the last one last, and their
        argmax at each position; nothing of it is kept. What goes wrong with it, NaN included, is
        the error of this row alone.

        Of a row with a draft, `logits` are those behind its newest token and behind each token of
        the draft; a position is looked at only when the ones before it gave the draft's tokens.
        """
        chosen: list[Sampled] = []
        try:
            if row.all_logits:
                self._collect(row, logits)
            if not row.samples:
                return Outcome()
            first = 0 if row.draft else len(logits) - 1
            for position, guess in enumerate((*row.draft, None), start=first):
                chosen.append(self._sample(row.sequence, logits, position, best[position]))
                if chosen[-1].token_id != guess:
                    break
        except Exception as error:
            return Outcome(tuple(chosen), error=one_line(error))
        return Outcome(tuple(chosen), self._prompt(row.sequence))

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._samplers.pop(sequence, None)
        self._prompts.pop(sequence, None)

    def _sample(self, sequence: Sequence, logits: F32, position: int, best: int) -> Sampled:
        sampler = self._samplers.get(sequence) or self._start(sequence)
        if sampler.takes_best and logits.shape[1] == self._vocab_size:
            # Without a view of the row: most steps need two numbers of it.
            return sampler.sample_best(best, logits.item(position, best))
        return sampler.sample(logits[position], best)

    def _start(self, sequence: Sequence) -> SequenceSampler:
        sampler = self._samplers[sequence] = SequenceSampler(
            sequence.params,
            sequence.request.prompt_token_ids,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos,
            index=sequence.index,
            seed=sequence.params.seed or 0,
            grammar=sequence.request.grammar,
        )
        return sampler

    def _collect(self, row: PlanRow, logits: F32) -> None:
        if row.start == 0:
            self._prompts[row.sequence] = [None]
        followed = _followed(row)
        num = row.sequence.params.prompt_logprobs or 0
        self._prompts[row.sequence] += prompt_logprobs(logits[: len(followed)], followed, num)

    def _prompt(self, sequence: Sequence) -> PromptLogprobs | None:
        return self._prompts.pop(sequence, None)


def _followed(row: PlanRow) -> Ordered[int]:
    """The tokens that came after each token of the chunk; none is known after the newest."""
    return row.sequence.token_ids[row.start + 1 : row.start + row.num_tokens + 1]


def one_line(error: BaseException) -> str:
    """An error for a user: our own messages as they are, others with their kind."""
    text = " ".join(str(error).split())
    if isinstance(error, TrtllmLiteError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
