"""Rows of one run, sampled together, against each row's own sampler."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.plan import Outcome, PlanRow
from trtllm_lite.runtime.request import Request, Sequence
from trtllm_lite.runtime.row_sampler import RowSampler
from trtllm_lite.runtime.sampler import Sampled, SequenceSampler
from trtllm_lite.runtime.sampling_params import SamplingParams

VOCAB, EOS, PROMPT = 24, 0, (1, 2, 3)
F32 = npt.NDArray[np.float32]

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    min_tokens=st.sampled_from([0, 0, 2]),
    max_tokens=st.just(9),
    logprobs=st.sampled_from([None, None, 2]),
    logit_bias=st.sampled_from([{}, {5: 3.0}]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    seed=st.integers(0, 9),
)


def row_of(slot: int, given_params: SamplingParams, **more: Any) -> PlanRow:
    sequence = Sequence(Request(str(slot), PROMPT, given_params), 0, list(PROMPT), 99)
    return PlanRow(sequence, slot, len(PROMPT) - 1, 1, len(PROMPT), **more)


def block(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).normal(0, 2, (*shape, VOCAB)).astype(np.float32)


def alone(row: PlanRow) -> SequenceSampler:
    wanted, ends = row.sequence.params, (EOS,)
    return SequenceSampler(
        wanted, PROMPT, vocab_size=VOCAB, eos_token_ids=ends, index=0, seed=wanted.seed or 0
    )


@given(st.lists(params, min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=120, deadline=None)
def test_rows_together_get_what_each_gets_alone(many: list[SamplingParams], seed: int) -> None:
    """Whatever the mix of parameters, over several steps."""
    rows = [row_of(slot, one) for slot, one in enumerate(many)]
    together, own = RowSampler(VOCAB, (EOS,)), [alone(row) for row in rows]
    for step in range(4):
        logits = block(seed + step, len(rows), 1)
        kept = logits.copy()
        outcomes = together.take_all(rows, logits)
        np.testing.assert_array_equal(logits, kept)
        for row, sampler, own_logits in zip(rows, own, logits, strict=True):
            expected = Outcome((sampler.sample(own_logits[0]),))
            assert outcomes[row.sequence] == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_what_is_wrong_with_a_row_is_the_error_of_that_row_alone(
    value: float, temperature: float, steps_before: int
) -> None:
    rows = [row_of(slot, SamplingParams(temperature=temperature, seed=1)) for slot in range(3)]
    sampler = RowSampler(VOCAB, (EOS,))
    for step in range(steps_before):
        sampler.take_all(rows, block(9 + step, 3, 1))
    logits = block(1, 3, 1)
    logits[1, 0, slice(None) if value == -math.inf else 7] = value
    first, second, third = sampler.take_all(rows, logits).values()
    assert second.error is not None
    assert second.sampled == ()
    assert first.error is third.error is None
    assert len(first.sampled) == len(third.sampled) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_another_vocabulary_are_an_error_of_every_row(temperature: float) -> None:
    rows = [row_of(slot, SamplingParams(temperature=temperature, seed=1)) for slot in range(2)]
    sampler = RowSampler(VOCAB, (EOS,))
    first = sampler.take_all(rows, block(1, 2, 1))
    assert [outcome.error for outcome in first.values()] == [None, None]
    for outcome in sampler.take_all(rows, block(1, 2, 1)[..., :-1]).values():
        assert outcome.error is not None
        assert "has 24 tokens" in outcome.error


def test_a_row_in_prefill_gives_nothing_yet() -> None:
    row = row_of(0, SamplingParams(temperature=0.0))
    earlier = PlanRow(row.sequence, 0, 0, 2, len(PROMPT))
    assert RowSampler(VOCAB, (EOS,)).take(earlier, block(1, 1), [4]) == Outcome()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_computes_its_tokens_again_gives_nothing_until_it_has_them(
    temperature: float,
) -> None:
    """As one does that was preempted: it has chosen tokens already."""
    row = row_of(0, SamplingParams(temperature=temperature, seed=1))
    sampler = RowSampler(VOCAB, (EOS,))
    assert len(sampler.take_all([row], block(1, 1, 1))[row.sequence].sampled) == 1
    again = PlanRow(row.sequence, 0, 0, 2, len(PROMPT) + 1)
    assert sampler.take_all([again], block(2, 1, 1)) == {row.sequence: Outcome()}


def test_greedy_rows_beside_one_with_a_draft_take_the_last_position() -> None:
    logits = block(5, 2, 3)
    greedy = SamplingParams(temperature=0.0)
    drafted, plain = row_of(0, greedy), row_of(1, greedy)
    sampler = RowSampler(VOCAB, (EOS,))
    sampler.take_all([drafted, plain], block(4, 2, 1))
    best: list[int] = logits[0].argmax(axis=1).tolist()
    drafted = PlanRow(
        drafted.sequence, 0, drafted.start, 3, drafted.context_len + 2, draft=(best[0], best[1])
    )
    outcomes = sampler.take_all([drafted, plain], logits)
    assert [s.token_id for s in outcomes[drafted.sequence].sampled] == best
    assert outcomes[plain.sequence] == Outcome((Sampled(int(logits[1, -1].argmax()), None),))


def test_a_draft_is_taken_as_far_as_it_is_the_argmax() -> None:
    logits = block(3, 3)
    best: list[int] = logits.argmax(axis=1).tolist()
    row = row_of(0, SamplingParams(temperature=0.0), draft=(best[0], best[1] + 1))
    row = PlanRow(row.sequence, 0, row.start, 3, row.context_len + 2, draft=row.draft)
    (outcome,) = RowSampler(VOCAB, (EOS,)).take_all([row], logits[None]).values()
    assert outcome.sampled == (Sampled(best[0], None), Sampled(best[1], None))
