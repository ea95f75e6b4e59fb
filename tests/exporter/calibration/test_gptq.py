"""GPTQ against the textbook: one column at a time, with the whole inverse updated, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.exporter.calibration.gptq import (
    DAMPING,
    LAZY,
    expected_error,
    factorize,
    round_with_feedback,
)
from trtllm_lite.exporter.calibration.grid import find_grid, nearest, values

BITS, BLOCK = 4, 32


def problem(n: int, k: int, seed: int, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and the second moment of correlated inputs of very different sizes."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(tokens, k)) @ (np.eye(k) + 0.4 * rng.normal(size=(k, k)))
    x = mixed * rng.exponential(size=k)
    return (
        torch.from_numpy(rng.standard_t(4, (n, k))).float(),
        torch.from_numpy(x.T @ x / tokens).float(),
    )


def slow_gptq(rows: Any, moment: Any, scale: Any, zero: Any) -> Any:
    """Round the most important column left, give its error to the others, drop it from H^-1."""
    k = rows.shape[1]
    damped = moment + DAMPING * np.trace(moment) / k * np.eye(k)
    inverse, left, q = np.linalg.inv(damped), rows.copy(), np.empty_like(rows)
    for j in np.argsort(-np.diag(moment), kind="stable"):
        s, z = scale[:, j // BLOCK], zero[:, j // BLOCK]
        q[:, j] = np.clip(np.rint(left[:, j] / s + z), 0, 2**BITS - 1)
        error = (left[:, j] - (q[:, j] - z) * s) / inverse[j, j]
        left -= np.outer(error, inverse[j])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return q


def output_error(rows: Any, made: Any, moment: Any) -> float:
    change = rows - made
    return float(((change @ moment) * change).sum())


@pytest.mark.parametrize("k", [1, 31, 32, LAZY + 1, 3 * LAZY])
def test_equals_the_textbook(k: int) -> None:
    rows, moment = problem(6, k, seed=k)
    scale, zero = find_grid(rows, moment.diagonal(), BITS, BLOCK)
    q = round_with_feedback(rows, factorize(moment), scale, zero, BITS, BLOCK)
    arrays = (x.double().numpy() for x in (rows, moment, scale, zero))
    assert (q.numpy() == slow_gptq(*arrays)).mean() > 0.99


@given(st.integers(0, 2**32 - 1))
def test_the_factor_is_of_the_inverse(seed: int) -> None:
    _, moment = problem(1, 20, seed)
    factor = factorize(moment)
    upper = factor.upper.double()
    damped = moment.double() + DAMPING * moment.diagonal().mean() * torch.eye(20)
    ordered = damped[factor.order][:, factor.order]
    assert torch.equal(upper, upper.triu())
    assert torch.allclose(upper.T @ upper @ ordered, torch.eye(20).double(), atol=1e-3)
    power = moment.diagonal()[factor.order]
    assert (power[:-1] >= power[1:]).all()


def test_outputs_change_less_than_by_rounding_to_nearest() -> None:
    rows, moment = problem(32, 192, seed=0)
    scale, zero = find_grid(rows, moment.diagonal(), BITS, BLOCK)
    plain = values(nearest(rows, scale, zero, BITS, BLOCK), scale, zero, BLOCK)
    q = round_with_feedback(rows, factorize(moment), scale, zero, BITS, BLOCK)
    made = values(q, scale, zero, BLOCK)
    assert output_error(rows, made, moment) < 0.7 * output_error(rows, plain, moment)


def test_independent_features_have_nothing_to_make_up_for() -> None:
    rows, _ = problem(5, 96, seed=3)
    scale, zero = find_grid(rows, torch.ones(96), BITS, BLOCK)
    q = round_with_feedback(rows, factorize(torch.eye(96)), scale, zero, BITS, BLOCK)
    assert torch.equal(q, nearest(rows, scale, zero, BITS, BLOCK))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_few_tokens_are_enough_to_go_on(tokens: int) -> None:
    """A moment of low rank, down to none at all, gives finite integers on the grid."""
    rows, _ = problem(4, 64, seed=4)
    x = torch.from_numpy(np.random.default_rng(5).normal(size=(tokens, 64))).float()
    moment = x.T @ x / max(1, tokens)
    scale, zero = find_grid(rows, torch.ones(64), BITS, BLOCK)
    q = round_with_feedback(rows, factorize(moment), scale, zero, BITS, BLOCK)
    assert torch.isfinite(q).all()
    assert torch.equal(q, q.round().clamp(0, 2**BITS - 1))


def test_a_block_of_zeros_stays_zero() -> None:
    rows, moment = problem(3, 64, seed=6)
    rows[1, :BLOCK] = 0
    scale, zero = find_grid(rows, moment.diagonal(), BITS, BLOCK)
    q = round_with_feedback(rows, factorize(moment), scale, zero, BITS, BLOCK)
    assert (values(q, scale, zero, BLOCK)[1, :BLOCK] == 0).all()


def test_the_expected_error_is_about_right() -> None:
    rows, moment = problem(64, 192, seed=7)
    scale, zero = find_grid(rows, moment.diagonal(), BITS, BLOCK)
    factor = factorize(moment)
    made = values(round_with_feedback(rows, factor, scale, zero, BITS, BLOCK), scale, zero, BLOCK)
    ratio = float(expected_error(factor, scale, BLOCK).sum()) / output_error(rows, made, moment)
    assert 0.6 < ratio < 1.7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -5.0])
def test_what_is_no_second_moment_is_refused(bad: float) -> None:
    moment = torch.eye(4)
    moment[1, 2] = moment[2, 1] = bad * 100
    with pytest.raises(ValueError, match="not positive semidefinite"):
        factorize(moment)
