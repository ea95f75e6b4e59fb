"""Choose the next token of one sequence from its logits, as its `SamplingParams` say."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime import sampling_ops as ops
from trtllm_lite.runtime.errors import RequestError, StepError
from trtllm_lite.runtime.grammar import Constraint, Grammar
from trtllm_lite.runtime.sampling_params import SamplingParams

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sampled:
    """One chosen token. `logprobs` maps token -> (logprob, rank) of the raw distribution, the
    chosen token first, then the most likely ones; None when not asked for."""

    token_id: int
    logprobs: dict[int, tuple[float, int]] | None


class SequenceSampler:
    """The sampling state of one sequence: its random stream, token counts and place in a grammar.

    Nothing else influences the result, so a sequence gets the same tokens alone, in any batch and
    after any preemption. `seed` is the resolved base seed of the request; choice `index` has a
    stream of its own. Raises RequestError for token ids outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        index: int,
        seed: int,
        grammar: Grammar | None = None,
    ) -> None:
        check_token_ids("prompt_token_ids", prompt_token_ids, vocab_size)
        check_token_ids("logit_bias", params.logit_bias, vocab_size)
        check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        self._params = params
        self._vocab_size = vocab_size
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)
        ends = {*eos_token_ids, *params.stop_token_ids}
        self._end_ids = np.array(sorted(t for t in ends if t < vocab_size), np.intp)
        self._constraint = None if grammar is None else Constraint(grammar, self._end_ids)
        self._num_sampled = 0
        self._counts = _TokenCounts() if _has_penalties(params) else None
        if self._counts is not None and params.repetition_penalty != 1.0:
            self._counts.see(prompt_token_ids)
        # spawn_key keeps (seed, index) pairs apart; seeds are signed 64-bit, entropy is not.
        stream = np.random.SeedSequence(seed % 2**64, spawn_key=(index,))
        self._bits = np.random.PCG64(stream)
        plain = params.logprobs is None and not _adjusts(params) and grammar is None
        self.takes_best = params.greedy and plain
        """Whether the argmax of the logits is all that it ever asks of them."""

    def sample(self, logits: F32, best: int | None = None) -> Sampled:
        """Choose a token from `logits` [vocab] float32, which is left as it is, and record it.
        `best` is their argmax, where it is known already: rows of a batch are searched together.

        Sampling draws exactly one random number a token; greedy choice draws none. Raises
        StepError for logits that are NaN, +inf, all masked, or of another shape.
        """
        if logits.shape != (self._vocab_size,):
            expected = f"the vocabulary has {self._vocab_size} tokens"
            raise StepError(f"the model gave logits of shape {logits.shape}; {expected}")
        best = int(logits.argmax()) if best is None else best
        _check_peak(float(logits[best]))
        adjusted = self.adjust(logits)
        token_id = self._choose(adjusted, best if adjusted is logits else int(adjusted.argmax()))
        num = self._params.logprobs
        logprobs = None if num is None else ops.top_logprobs(logits, token_id, num)
        self._record(token_id)
        return Sampled(token_id, logprobs)

    def sample_best(self, best: int, peak: float) -> Sampled:
        """What `sample` gives where `takes_best` holds, from the argmax of the logits and its logit
        alone. Raises StepError as `sample` does."""
        if not math.isfinite(peak):
            raise _no_distribution(peak)
        return Sampled(best, None)

    def adjust(self, logits: F32) -> F32:
        """Logits after grammar, bias, min_tokens mask and penalties: a copy, or `logits` itself
        when nothing applies."""
        out = logits if self._constraint is None else self._constraint.mask(logits)
        must_end = self._constraint is not None and self._constraint.must_end
        early = self._num_sampled < self._params.min_tokens
        masked = early and self._end_ids.size > 0 and not must_end
        penalised = self._counts is not None and self._counts.size > 0
        if not (masked or penalised or self._bias_ids.size):
            return out
        out = logits.copy() if out is logits else out
        out[self._bias_ids] += self._bias
        if masked:
            out[self._end_ids] = -np.inf
        if self._counts is not None:
            self._counts.apply(out, self._params)
        return out

    def _choose(self, logits: F32, best: int) -> int:
        if logits[best] == -math.inf:
            raise StepError("every token is masked: no token can be chosen")
        p = self._params
        if p.greedy:
            return best
        uniform = (int(self._bits.random_raw()) >> 11) * 2.0**-53
        ids, mass = ops.candidates(logits, p.temperature, p.top_k, p.top_p, p.min_p)
        index = ops.draw(mass, uniform)
        return index if ids is None else int(ids[index])

    def _record(self, token_id: int) -> None:
        self._num_sampled += 1
        if self._constraint is not None:
            self._constraint.advance(token_id)
        if self._counts is not None:
            self._counts.generated(token_id)


class _TokenCounts:
    """How often each seen token was generated, as growing arrays that index into the logits.

    Tokens stand in the order in which they were first seen; prompt tokens have a count of 0 until
    they are generated.
    """

    def __init__(self) -> None:
        self.size = 0
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, np.intp)
        self._counts = np.empty(64, np.float64)

    def see(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._place(token_id)

    def generated(self, token_id: int) -> None:
        place = self._place(token_id)
        self._counts[place] += 1

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, self.size)
        if place < self.size:
            return place
        if self.size == self._ids.size:
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._ids[place], self._counts[place] = token_id, 0.0
        self.size += 1
        return place

    def apply(self, logits: F32, params: SamplingParams) -> None:
        """Repetition, then presence and frequency penalties, in place."""
        ids, counts = self._ids[: self.size], self._counts[: self.size]
        values = logits[ids].astype(np.float64)
        scale = params.repetition_penalty
        with np.errstate(over="ignore"):
            values = np.where(values > 0.0, values / scale, values * scale)
        values -= params.frequency_penalty * counts
        values -= params.presence_penalty * (counts > 0.0)
        # A tiny repetition_penalty may exceed float32: that is a very likely token, not an error.
        finite = np.finfo(np.float32)
        clipped = np.clip(values, float(finite.min), float(finite.max))
        logits[ids] = np.where(values == -np.inf, values, clipped)


def prompt_logprobs(
    logits: F32, token_ids: Sequence[int], num: int
) -> list[dict[int, tuple[float, int]]]:
    """Log-probabilities of the tokens that followed: row i of `logits` [k, vocab] predicted
    token_ids[i]. Each entry as `Sampled.logprobs`. Raises StepError for NaN or +inf logits."""
    if logits.ndim != 2 or logits.shape[0] != len(token_ids):
        raise StepError(f"prompt logits of shape {logits.shape} for {len(token_ids)} tokens")
    for row in logits:
        _check_peak(float(row[row.argmax()]))
    pairs = zip(logits, token_ids, strict=True)
    return [ops.top_logprobs(row, token_id, num) for row, token_id in pairs]


def _check_peak(peak: float) -> None:
    """Raise StepError when no distribution belongs to logits whose argmax is worth `peak`: argmax
    finds the first NaN where there is one. -inf is a masked token."""
    if not math.isfinite(peak):
        raise _no_distribution(peak)


def _no_distribution(peak: float) -> StepError:
    if math.isnan(peak):
        return StepError("the model gave NaN logits: the bundle or its backend is broken")
    if peak > 0.0:
        return StepError("the model gave infinite logits: the bundle or its backend is broken")
    return StepError("the model masked every token (all logits are -inf)")


def check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError naming `param` when a token id is outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            message = f"token id {token_id} is outside the vocabulary; allowed: 0 to"
            raise RequestError(param, f"{message} {vocab_size - 1}")


def candidates_needed(params: SamplingParams, *, constrained: bool) -> int:
    """How many of the largest logits decide on a token, 0 when all of them do. constrained: by a
    grammar. With top_k, no other setting looks at more than the top_k."""
    if constrained or params.logprobs is not None or _adjusts(params):
        return 0
    return 1 if params.greedy else max(0, params.top_k)


def _adjusts(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or params.min_tokens > 0 or _has_penalties(params)


def _has_penalties(params: SamplingParams) -> bool:
    penalties = (params.presence_penalty, params.frequency_penalty)
    return params.repetition_penalty != 1.0 or any(penalties)
