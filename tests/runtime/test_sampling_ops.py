"""Selection, the draw and logprobs, each against a full sort in float64."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime import sampling_ops as ops

F32 = npt.NDArray[np.float32]
LOGIT = st.one_of(
    st.integers(-4, 4).map(float),
    st.floats(-60, 60, width=32),
    st.floats(-(2.0**127), 2.0**127, width=32),
    st.just(-math.inf),
)


@dataclass(frozen=True)
class Filters:
    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True)
class Expected:
    """All tokens that may be drawn, best first, with their weights; between `fewest` and `most` of
    them are kept: they differ only where a threshold is within `tolerance` of a token's share."""

    order: list[int]
    weights: npt.NDArray[np.float64]
    fewest: int
    most: int


def reference(logits: F32, f: Filters, tolerance: float) -> Expected:
    x = logits.astype(np.float64)
    order = sorted((i for i in range(x.size) if x[i] > -math.inf), key=lambda i: (-x[i], i))
    if 0 < f.top_k < x.size:
        order = order[: f.top_k]
    weights = np.exp((x[order] - x[order[0]]) / f.temperature)
    share = np.cumsum(weights) / weights.sum()

    def kept(top_p: float, min_p: float) -> int:
        in_nucleus = int(np.searchsorted(share, top_p)) + 1 if f.top_p < 1 else len(order)
        likely = int(np.count_nonzero(weights >= min_p)) if f.min_p > 0 else len(order)
        return max(1, min(in_nucleus, likely, len(order)))

    fewest = kept(f.top_p - tolerance, f.min_p * (1 + 10 * tolerance))
    most = kept(f.top_p + tolerance, f.min_p * (1 - 10 * tolerance))
    return Expected(order, weights, fewest, most)


def check_distribution(logits: F32, f: Filters, tolerance: float) -> None:
    ids, probs = ops.distribution(
        logits, temperature=f.temperature, top_k=f.top_k, top_p=f.top_p, min_p=f.min_p
    )
    assert np.all(np.diff(ids) > 0)
    assert probs.sum() == pytest.approx(1.0, abs=1e-12)
    allowed = logits[ids] > -math.inf
    assert not probs[~allowed].any()
    ids, probs = ids[allowed], probs[allowed]
    expected = reference(logits, f, tolerance)
    assert expected.fewest <= ids.size <= expected.most
    assert ids.tolist() == sorted(expected.order[: ids.size])
    weights = dict(zip(expected.order, expected.weights, strict=True))
    mass = np.array([weights[i] for i in ids.tolist()])
    np.testing.assert_allclose(probs, mass / mass.sum(), rtol=10 * tolerance, atol=tolerance / 10)


FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([1.0, 0.05, 0.7, 3.0, 100.0]),
    top_k=st.one_of(st.just(0), st.integers(-1, 45)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0), st.sampled_from([0.5, 0.9, 1e-300])),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1.0, 0.25])),
)


@given(st.lists(LOGIT, min_size=1, max_size=40), FILTERS)
@settings(max_examples=400, deadline=None)
def test_small_rows_keep_the_reference_set(values: list[float], filters: Filters) -> None:
    logits = np.array(values, np.float32)
    if logits.max() == -math.inf:
        logits[0] = 0.0
    check_distribution(logits, filters, 1e-9)


def big_row(seed: int, size: int, spread: float, step: float, masked: float, outliers: int) -> F32:
    """Random logits: `step` > 0 rounds them so that many are equal."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, spread, size)
    x = np.round(x / step) * step if step else x
    x[rng.integers(0, size, outliers)] += rng.choice([12.0, 20.0, -1e4, -1e30], outliers)
    x[rng.random(size) < masked] = -math.inf
    x[rng.integers(0, size)] = 1.0
    return x.astype(np.float32)


BIG_ROWS = st.builds(
    big_row,
    seed=st.integers(0, 2**32),
    size=st.sampled_from([4097, 9000, 50_000]),
    spread=st.sampled_from([0.0, 0.1, 3.0]),
    step=st.sampled_from([0.0, 0.5]),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
    outliers=st.integers(0, 6),
)
BIG_FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([1.0, 0.3, 2.0, 50.0]),
    top_k=st.sampled_from([0, 1, 50, 1500, 4096, 20_000]),
    top_p=st.sampled_from([1.0, 0.9, 0.1, 0.999, 1 - 1e-12]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.1]),
)


@given(BIG_ROWS, BIG_FILTERS)
@settings(max_examples=60, deadline=None)
def test_big_rows_keep_the_reference_set(logits: F32, filters: Filters) -> None:
    check_distribution(logits, filters, 2e-6)


@pytest.mark.parametrize("size", [30, 50_000])
def test_a_vanishing_temperature_takes_the_best(size: int) -> None:
    logits = np.random.default_rng(size).normal(0, 3, size).astype(np.float32)
    ids, probs = ops.distribution(logits, temperature=5e-324, top_p=0.9)
    assert ids.tolist() == [int(logits.argmax())]
    _, unfiltered = ops.distribution(logits, temperature=5e-324)
    assert unfiltered[logits.argmax()] == 1.0
    assert probs.tolist() == [1.0]


def test_every_value_in_one_place_is_found_among_far_outliers() -> None:
    # Each outlier stretches the histogram so far that all other values share one bin.
    logits = np.linspace(0, 1, 20_000, dtype=np.float32)
    logits[:6] = [-1e30, -1e25, -1e20, -1e15, -1e10, -1e5]
    check_distribution(logits, Filters(1.0, 15_000, 1.0, 0.0), 2e-6)
    check_distribution(logits, Filters(1.0, 0, 0.5, 0.0), 2e-6)


@given(
    st.one_of(
        st.lists(st.floats(0, 10), min_size=1, max_size=30).map(np.array),
        BIG_ROWS.map(lambda row: ops.weights(row, 1.0)),
    ),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-53), st.just(0.0)),
)
@settings(max_examples=150, deadline=None)
def test_draw_inverts_the_cumulated_distribution(mass: ops.Floats, uniform: float) -> None:
    if not mass.any():
        mass = mass + 1.0
    index = ops.draw(mass, uniform)
    assert mass[index] > 0
    upto = np.cumsum(mass.astype(np.float64)) / mass.sum(dtype=np.float64)
    before = upto[index - 1] if index else 0.0
    assert before - 1e-6 <= uniform <= upto[index] + 1e-6


def test_draw_is_exact_on_exact_weights() -> None:
    mass = np.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    got = [ops.draw(mass, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53)]
    assert got == [1, 1, 3, 3, 4, 4]


def check_logprobs(logits: F32, token: int, num: int, tolerance: float) -> None:
    got = ops.top_logprobs(logits, token, num)
    x = logits.astype(np.float64)
    logsoftmax = x - x.max() - math.log(np.exp(x - x.max()).sum())
    best = sorted((i for i in range(x.size) if x[i] > -math.inf), key=lambda i: (-x[i], i))[:num]
    assert list(got) == list(dict.fromkeys([token, *best]))
    for i, (logprob, rank) in got.items():
        assert logprob == pytest.approx(logsoftmax[i], abs=tolerance, rel=1e-9)
        assert rank == 1 + np.count_nonzero(x > x[i])


@given(st.lists(LOGIT, min_size=1, max_size=40), st.integers(0, 20), st.data())
@settings(max_examples=150, deadline=None)
def test_logprobs_of_small_rows(values: list[float], num: int, data: st.DataObject) -> None:
    logits = np.array(values, np.float32)
    if logits.max() == -math.inf:
        logits[0] = 0.0
    check_logprobs(logits, data.draw(st.integers(0, logits.size - 1)), num, 1e-9)


@given(BIG_ROWS, st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_logprobs_of_big_rows(logits: F32, num: int) -> None:
    check_logprobs(logits, logits.size // 2, num, 2e-6)
