"""Perplexity, divergence and agreement against their definitions, in float64, token by token."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.exporter.quality.measure import PIECE, Quality, compare, total

VOCAB = 7


def random_logits(rng: np.random.Generator, tokens: int, spread: float = 4.0) -> Any:
    return (rng.standard_normal((tokens, VOCAB)) * spread).astype(np.float32)


def slow_quality(reference: Any, other: Any, ids: Any) -> Quality:
    nll, ref_nll, kl, agreed = [], [], [], []
    for p_row, q_row, token in zip(reference.tolist(), other.tolist(), ids.tolist(), strict=True):
        p = [math.exp(v) / sum(math.exp(x) for x in p_row) for v in p_row]
        q = [math.exp(v) / sum(math.exp(x) for x in q_row) for v in q_row]
        nll.append(-math.log(q[token]))
        ref_nll.append(-math.log(p[token]))
        kl.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        agreed.append(p.index(max(p)) == q.index(max(q)))
    n = len(ids)
    return Quality(
        ppl=math.exp(sum(nll) / n),
        ref_ppl=math.exp(sum(ref_nll) / n),
        kl=sum(kl) / n,
        top1=sum(agreed) / n,
        num_tokens=n,
    )


@given(st.integers(1, 2 * PIECE + 1), st.integers(0, 2**32 - 1))
def test_equals_the_definitions(tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    reference, other = random_logits(rng, tokens), random_logits(rng, tokens)
    ids = rng.integers(0, VOCAB, tokens)
    got, want = compare(reference, other, ids).quality(), slow_quality(reference, other, ids)
    assert got.ppl == pytest.approx(want.ppl, rel=1e-5)
    assert got.ref_ppl == pytest.approx(want.ref_ppl, rel=1e-5)
    assert got.kl == pytest.approx(want.kl, rel=1e-4, abs=1e-6)
    assert (got.top1, got.num_tokens) == (want.top1, want.num_tokens)
    assert got.ppl_ratio == got.ppl / got.ref_ppl


@given(st.integers(2, 40), st.integers(0, 2**32 - 1), st.data())
def test_parts_of_a_text_add_up(tokens: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    reference, other = random_logits(rng, tokens), random_logits(rng, tokens)
    ids = rng.integers(0, VOCAB, tokens)
    cut = data.draw(st.integers(1, tokens - 1))
    parts = [compare(reference[s], other[s], ids[s]) for s in (slice(0, cut), slice(cut, None))]
    got, want = total(parts), compare(reference, other, ids).quality()
    assert got.ppl == pytest.approx(want.ppl)
    assert got.kl == pytest.approx(want.kl)
    assert (got.top1, got.num_tokens) == (want.top1, want.num_tokens)


def test_a_model_is_as_good_as_itself() -> None:
    logits = random_logits(np.random.default_rng(0), 20)
    quality = compare(logits, logits.copy(), np.arange(20) % VOCAB).quality()
    assert quality.kl == 0.0
    assert (quality.ppl_ratio, quality.top1) == (1.0, 1.0)


def test_adding_a_constant_changes_nothing() -> None:
    logits = random_logits(np.random.default_rng(1), 20)
    quality = compare(logits, logits + 3, np.arange(20) % VOCAB).quality()
    assert quality.kl == pytest.approx(0.0, abs=1e-5)
    assert quality.ppl_ratio == pytest.approx(1.0, abs=1e-5)


def test_a_nan_is_not_averaged_away() -> None:
    reference = random_logits(np.random.default_rng(2), 3 * PIECE)
    other = reference.copy()
    other[PIECE + 1, 2] = np.nan
    quality = compare(reference, other, np.zeros(len(reference), np.int64)).quality()
    assert math.isnan(quality.ppl_ratio)
    assert math.isnan(quality.kl)


def test_masked_tokens_of_the_reference_count_nothing() -> None:
    reference = np.array([[0.0, 1.0, -np.inf]], np.float32)
    other = np.array([[0.0, 1.0, -5.0]], np.float32)
    quality = compare(reference, other, np.array([1])).quality()
    p = math.exp(1) / (1 + math.exp(1))
    want = -math.log((1 + math.exp(1)) / (1 + math.exp(1) + math.exp(-5)))
    assert quality.kl == pytest.approx(want, rel=1e-3)
    assert quality.ref_ppl == pytest.approx(1 / p)


def test_a_hopeless_model_has_infinite_perplexity() -> None:
    reference, other = np.zeros((1, 2), np.float32), np.array([[0.0, 2000.0]], np.float32)
    assert compare(reference, other, np.array([0])).quality().ppl == math.inf


def test_nothing_has_no_quality() -> None:
    with pytest.raises(ValueError, match="no token"):
        total([])
