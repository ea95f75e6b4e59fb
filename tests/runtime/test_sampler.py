"""One sequence's sampler: bias, penalties, its random stream, and what it refuses."""

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.errors import RequestError, StepError
from trtllm_lite.runtime.sampler import SequenceSampler, prompt_logprobs
from trtllm_lite.runtime.sampling_params import SamplingParams

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
VOCAB = 12


def sampler(
    params: SamplingParams,
    prompt: list[int] | None = None,
    *,
    vocab_size: int = VOCAB,
    index: int = 0,
    seed: int = 7,
) -> SequenceSampler:
    prompt = [1, 1, 3] if prompt is None else prompt
    return SequenceSampler(
        params, prompt, vocab_size=vocab_size, eos_token_ids=(0,), index=index, seed=seed
    )


def rows(seed: int, count: int, vocab_size: int = VOCAB) -> list[F32]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 2, vocab_size).astype(np.float32) for _ in range(count)]


def adjusted(
    logits: F32, params: SamplingParams, prompt: list[int], generated: list[int]
) -> list[float]:
    """The slow reference: one token at a time, in float64."""
    counts = Counter(generated)
    result = []
    for token, value in enumerate(logits.astype(np.float64).tolist()):
        value += params.logit_bias.get(token, 0.0)
        if len(generated) < params.min_tokens and token in {0, *params.stop_token_ids}:
            value = -math.inf
        if token in counts or token in prompt:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        if token in counts:
            value -= params.presence_penalty + params.frequency_penalty * counts[token]
        result.append(value)
    return result


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.integers(0, VOCAB + 1),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 2), max_size=2),
    ignore_eos=st.booleans(),
)


@given(PARAMS, st.lists(st.integers(0, VOCAB - 1), max_size=6), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_adjusted_logits_equal_the_reference(
    params: SamplingParams, prompt: list[int], seed: int
) -> None:
    one, generated = sampler(params, prompt, seed=seed), list[int]()
    for logits in rows(seed, 6):
        logits[seed % VOCAB] = -math.inf if seed % 3 == 0 else logits[0]
        expected = adjusted(logits, params, prompt, generated)
        np.testing.assert_allclose(one.adjust(logits), expected, rtol=1e-5, atol=1e-5)
        generated.append(one.sample(logits).token_id)


@given(PARAMS, st.integers(-(2**63), 2**63 - 1), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_tokens_equal_the_inverse_cdf_of_numpys_own_stream(
    params: SamplingParams, seed: int, index: int
) -> None:
    one = sampler(params, [2], index=index, seed=seed)
    stream = np.random.SeedSequence(seed % 2**64, spawn_key=(index,))
    rng = np.random.Generator(np.random.PCG64(stream))
    for logits in rows(index, 8):
        x = one.adjust(logits).astype(np.float64)
        token = one.sample(logits).token_id
        if params.greedy:
            assert token == max(range(VOCAB), key=lambda i: (x[i], -i))
            continue
        uniform = rng.random()
        probs = reference_probabilities(x, params)
        upto = np.cumsum(probs)
        assert probs[token] > 0
        assert upto[token] - probs[token] - 1e-9 <= uniform <= upto[token] + 1e-9


def reference_probabilities(x: F64, params: SamplingParams) -> F64:
    """The filters by full sorts of whole-vocabulary arrays."""
    order = np.lexsort((np.arange(x.size), -x))
    keep = np.zeros(x.size, bool)
    keep[order[: params.top_k or x.size]] = True
    probs: F64 = np.where(keep, np.exp((x - x.max()) / params.temperature), 0.0)
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    keep[order] &= (before < params.top_p - 1e-12) | (params.top_p == 1.0)
    keep &= probs >= params.min_p * probs.max()
    probs[~keep] = 0.0
    probs /= probs.sum()
    return probs


@given(PARAMS, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_what_takes_the_best_takes_what_sample_takes(params: SamplingParams, seed: int) -> None:
    """And only what never looks at anything else says so."""
    one, other = sampler(params), sampler(params)
    for logits in rows(seed, 4):
        best = int(logits.argmax())
        expected = one.sample(logits)
        assert other.sample(logits, best) == expected
        if one.takes_best:
            assert one.sample_best(best, float(logits[best])) == expected
    plain = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9, stop_token_ids=[4])
    assert sampler(plain).takes_best


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"logit_bias": {1: 1.0}},
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
    ],
)
def test_what_needs_more_than_the_best_says_so(more: dict[str, Any]) -> None:
    assert not sampler(SamplingParams(**{"temperature": 0.0, "max_tokens": 9, **more})).takes_best


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.array([1, 5, 2, 5, 5, 0, 0, 0, 0, 0, 0, 0], np.float32)
    assert sampler(SamplingParams(temperature=0)).sample(logits).token_id == 1


def test_a_sequence_gets_the_same_tokens_alone_and_among_others() -> None:
    params = SamplingParams(temperature=1.5, frequency_penalty=0.5, repetition_penalty=1.2)
    logits = rows(3, 30)
    one, other = sampler(params), sampler(params, seed=8)
    alone = [one.sample(x).token_id for x in logits]
    one, mixed = sampler(params), list[int]()
    for x in logits:
        other.sample(x[::-1].copy())
        mixed.append(one.sample(x).token_id)
        other.sample(x)
    assert alone == mixed


def test_streams_of_other_seeds_and_choices_differ() -> None:
    logits = np.zeros(1000, np.float32)

    def stream(seed: int, index: int) -> tuple[int, ...]:
        one = sampler(SamplingParams(), vocab_size=1000, index=index, seed=seed)
        return tuple(one.sample(logits).token_id for _ in range(8))

    # The last seeds hold an index in their upper half, or are negative.
    cases = [(0, 0), (0, 1), (1, 0), (1, 1), (2**32, 0), (1 + 2**32, 0), (-1, 0), (2**63 - 1, 0)]
    assert len({stream(*case) for case in cases}) == len(cases)
    assert stream(5, 3) == stream(5, 3)


def test_one_random_number_a_token_even_with_one_candidate() -> None:
    narrow = [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)]
    samplers = [sampler(params) for params in (SamplingParams(), *narrow)]
    for logits in rows(1, 10):
        tokens = [one.sample(logits).token_id for one in samplers]
        assert tokens[1:] == [int(logits.argmax())] * 3
    states = [one._bits.state for one in samplers]
    assert all(state == states[0] for state in states)


def test_logits_are_left_as_they_are() -> None:
    params = SamplingParams(
        logit_bias={2: 5.0}, repetition_penalty=2.0, min_tokens=9, top_p=0.5, logprobs=3
    )
    one = sampler(params)
    for logits in rows(0, 5):
        before = logits.copy()
        logits.flags.writeable = False
        one.sample(logits)
        np.testing.assert_array_equal(logits, before)


def test_end_tokens_are_masked_until_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[4], ignore_eos=True)
    logits = np.zeros(VOCAB, np.float32)
    logits[[0, 4]] = [9, 8]
    one = sampler(params)
    assert [one.sample(logits).token_id for _ in range(4)] == [1, 1, 0, 0]


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = SamplingParams(
        temperature=0.3, logprobs=2, logit_bias={5: 50.0}, repetition_penalty=3.0, top_k=1
    )
    logits = rows(9, 1)[0]
    got = sampler(params).sample(logits)
    assert got.token_id == 5
    assert got.logprobs is not None
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    best = np.argsort(-logits, kind="stable")[:2].tolist()
    assert list(got.logprobs) == list(dict.fromkeys([5, *best]))
    for token, (logprob, rank) in got.logprobs.items():
        assert logprob == pytest.approx(float(exact[token]), abs=1e-6)
        assert rank == 1 + int((logits > logits[token]).sum())


def test_logprobs_count_zero_is_the_chosen_token_and_none_is_nothing() -> None:
    logits = rows(2, 1)[0]
    zero = sampler(SamplingParams(temperature=0, logprobs=0)).sample(logits)
    assert zero.logprobs is not None
    assert list(zero.logprobs) == [zero.token_id]
    assert sampler(SamplingParams(temperature=0)).sample(logits).logprobs is None


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "masked")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(value: float, message: str, temperature: float) -> None:
    one = sampler(SamplingParams(temperature=temperature))
    logits = rows(0, 1)[0]
    logits[3 if value != -math.inf else slice(None)] = value
    with pytest.raises(StepError, match=message):
        one.sample(logits)
    with pytest.raises(StepError, match=message):
        one.sample_best(0, value)
    with pytest.raises(StepError, match=message):
        prompt_logprobs(logits[None], [0], 1)


def test_a_mask_over_every_token_is_an_error() -> None:
    logits = np.full(VOCAB, -math.inf, np.float32)
    logits[0] = 1.0
    with pytest.raises(StepError, match="every token is masked"):
        sampler(SamplingParams(min_tokens=1)).sample(logits)


def test_logits_of_another_vocabulary_are_an_error() -> None:
    with pytest.raises(StepError, match=r"\(13,\)"):
        sampler(SamplingParams()).sample(np.zeros(VOCAB + 1, np.float32))


@pytest.mark.parametrize(
    ("params", "prompt", "name"),
    [
        (SamplingParams(logit_bias={VOCAB: 1.0}), [1], "logit_bias"),
        (SamplingParams(stop_token_ids=[VOCAB]), [1], "stop_token_ids"),
        (SamplingParams(), [1, VOCAB], "prompt_token_ids"),
        (SamplingParams(), [-1], "prompt_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(
    params: SamplingParams, prompt: list[int], name: str
) -> None:
    with pytest.raises(RequestError, match=f"^{name}: token id .* allowed: 0 to 11"):
        sampler(params, prompt)


def test_a_tiny_repetition_penalty_does_not_overflow() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1e-300)
    logits = np.full(VOCAB, 2.0, np.float32)
    assert sampler(params, [3]).sample(logits).token_id == 3


def test_counts_survive_growth_past_their_first_size() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    one = sampler(params, [], vocab_size=500)
    logits = np.zeros(500, np.float32)
    assert [one.sample(logits).token_id for _ in range(1000)] == [*range(500), *range(500)]


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_prompt_logprobs_equal_log_softmax(seed: int, count: int, num: int) -> None:
    logits = np.stack(rows(seed, count))
    tokens = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    got = prompt_logprobs(logits, tokens, num)
    x = logits.astype(np.float64)
    exact = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    assert len(got) == count
    for row, token, entry in zip(exact, tokens, got, strict=True):
        best = np.argsort(-row, kind="stable")[:num].tolist()
        assert list(entry) == list(dict.fromkeys([token, *best]))
        for i, (logprob, rank) in entry.items():
            assert logprob == pytest.approx(row[i], abs=1e-9)
            assert rank == 1 + int((row > row[i]).sum())


def test_prompt_logprobs_need_one_row_a_token() -> None:
    with pytest.raises(StepError, match="for 3 tokens"):
        prompt_logprobs(np.zeros((2, VOCAB), np.float32), [1, 2, 3], 0)
