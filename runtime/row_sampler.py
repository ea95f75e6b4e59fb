"""From a row's logits to its outcome: samplers of the running sequences, prompt logprobs."""

from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.runtime.plan import Outcome, PlanRow, PromptLogprobs
from trtllm_lite.runtime.request import Sequence
from trtllm_lite.runtime.sampler import Sampled, SequenceSampler, prompt_logprobs

F32 = npt.NDArray[np.float32]


class RowSampler:
    """One `SequenceSampler` for each sequence, made when its first token is due: a queue of waiting
    sequences costs nothing. Requests come with their seed resolved (`params.seed` is set)."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._samplers: dict[Sequence, SequenceSampler] = {}
        self._prompts: dict[Sequence, PromptLogprobs] = {}

    def take(self, row: PlanRow, logits: F32) -> Outcome:
        """The outcome of a row that ran. `logits` [num_logits, vocab], the last one last; nothing
        of it is kept. What goes wrong with it, NaN included, is the error of this row alone."""
        try:
            if row.all_logits:
                self._collect(row, logits)
            if not row.samples:
                return Outcome()
            return Outcome(self._sample(row.sequence, logits[-1]), self._prompt(row.sequence))
        except Exception as error:
            return Outcome(error=one_line(error))

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._samplers.pop(sequence, None)
        self._prompts.pop(sequence, None)

    def _sample(self, sequence: Sequence, logits: F32) -> Sampled:
        if sequence not in self._samplers:
            self._samplers[sequence] = SequenceSampler(
                sequence.params,
                sequence.request.prompt_token_ids,
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos,
                index=sequence.index,
                seed=sequence.params.seed or 0,
            )
        return self._samplers[sequence].sample(logits)

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
