"""The searched grid is never worse than the block's range, and finds a grid that is there."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.exporter.calibration.grid import find_grid, nearest, values

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 70), st.sampled_from([2, 16, 32]))


def sample(shape: tuple[int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_t(3, shape) + rng.normal(size=(shape[0], 1))
    importance = rng.exponential(size=shape[1])
    return torch.from_numpy(rows).float(), torch.from_numpy(importance).float()


def slow_round_to_nearest(rows: Any, bits: int, block: int) -> Any:
    """Every block on its own, from its least to its largest value, zero included."""
    out, top = np.empty_like(rows), 2**bits - 1
    for r, row in enumerate(rows):
        for start in range(0, len(row), block):
            x = row[start : start + block]
            low, high = min(x.min(), 0.0), max(x.max(), 0.0)
            scale = (high - low) / top or 1.0
            zero = min(max(round(-low / scale), 0), top)
            q = np.clip(np.rint(x / scale + zero), 0, top)
            out[r, start : start + block] = (q - zero) * scale
    return out


@given(SHAPES, st.sampled_from([2, 4, 8]), st.integers(0, 2**32 - 1))
def test_never_worse_than_round_to_nearest(
    shape: tuple[int, int, int], bits: int, seed: int
) -> None:
    n, k, block = shape
    rows, importance = sample((n, k), seed)
    scale, zero = find_grid(rows, importance, bits, block)
    q = nearest(rows, scale, zero, bits, block)
    got = (rows - values(q, scale, zero, block)).square() @ importance
    plain = slow_round_to_nearest(rows.double().numpy(), bits, block)
    want = (rows.double().numpy() - plain) ** 2 @ importance.double().numpy()
    assert scale.shape == zero.shape == (n, -(-k // block))
    # Grids are compared by float32 sums of the weighted squares themselves.
    noise = 1e-6 * (rows.square() @ importance).numpy()
    assert (got.numpy() <= want * (1 + 1e-4) + noise).all()
    assert torch.equal(zero, zero.round())
    assert q.min() >= 0
    assert q.max() <= 2**bits - 1
    assert (scale >= 0).all()


def test_is_better_where_it_matters() -> None:
    rows, importance = sample((64, 96), 0)
    scale, zero = find_grid(rows, importance, 4, 32)
    got = (rows - values(nearest(rows, scale, zero, 4, 32), scale, zero, 32)).square() @ importance
    plain = torch.from_numpy(slow_round_to_nearest(rows.numpy(), 4, 32))
    assert got.sum() < 0.9 * ((rows - plain).square() @ importance).sum()


@given(st.integers(0, 15), st.integers(0, 2**32 - 1))
def test_a_grid_that_is_there_is_found(zero_point: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 16, 32)
    q[:2] = 0, 15
    step = float(np.float32(rng.uniform(0.01, 3)))
    rows = torch.from_numpy(((q - zero_point) * step)[None]).float()
    scale, zero = find_grid(rows, torch.ones(32), 4, 32)
    assert float(zero) == zero_point
    assert float(scale) == pytest.approx(step, rel=1e-5)
    assert nearest(rows, scale, zero, 4, 32)[0].tolist() == q.tolist()


@given(SHAPES, st.integers(0, 2**32 - 1))
def test_zero_stays_zero(shape: tuple[int, int, int], seed: int) -> None:
    n, k, block = shape
    rows, importance = sample((n, k), seed)
    rows[:, ::2] = 0
    rows[0] = 0
    scale, zero = find_grid(rows, importance, 4, block)
    made = values(nearest(rows, scale, zero, 4, block), scale, zero, block)
    assert (made[:, ::2] == 0).all()
    assert (made[0] == 0).all()
    assert torch.isfinite(made).all()


def test_columns_without_importance_still_get_a_grid() -> None:
    rows, _ = sample((3, 32), 1)
    scale, zero = find_grid(rows, torch.zeros(32), 4, 32)
    made = values(nearest(rows, scale, zero, 4, 32), scale, zero, 32)
    step = (rows.amax(1).clamp(min=0) - rows.amin(1).clamp(max=0)) / 15
    assert ((rows - made).abs() <= step[:, None]).all()
