"""Factors reach the right elements, wherever a tensor is cut into pieces."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.exporter.calibration.scaling import Scaling


def cut(flat: Any, places: list[int]) -> list[Any]:
    return np.split(flat, sorted(p % (len(flat) + 1) for p in places))


def powers(rng: np.random.Generator, count: int) -> Any:
    return np.exp2(rng.integers(-3, 4, count)).astype(np.float32)


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 7)),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([0.0, 1.0]),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_equals_the_whole_at_once(
    shape: tuple[int, int], given_factors: tuple[bool, bool], shift: float, places: list[int]
) -> None:
    rng = np.random.default_rng(shape)
    tensor = rng.normal(size=shape).astype(np.float32)
    rows, columns = powers(rng, shape[0]), powers(rng, shape[1])
    want = tensor + np.float32(shift)
    want *= rows[:, None] if given_factors[0] else 1
    want *= columns if given_factors[1] else 1
    scaling = Scaling(
        rows if given_factors[0] else None, columns if given_factors[1] else None, shift
    )
    got = np.concatenate(list(scaling.applied(cut(tensor.reshape(-1), places), shape)))
    assert got.dtype == np.float32
    assert np.array_equal(got.reshape(shape), want - np.float32(shift))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=2))
def test_one_after_the_other_is_both(sides: list[tuple[bool, bool]]) -> None:
    rng, shape = np.random.default_rng(0), (3, 4)
    tensor = rng.normal(size=12).astype(np.float32)
    first, second = (
        Scaling(powers(rng, 3) if rows else None, powers(rng, 4) if columns else None)
        for rows, columns in sides
    )
    want = next(second.applied(first.applied([tensor], shape), shape))
    assert np.array_equal(next(first.then(second).applied([tensor], shape)), want)


def test_different_shifts_do_not_combine() -> None:
    with pytest.raises(ValueError, match="do not combine"):
        Scaling(shift=1.0).then(Scaling())


def test_a_vector_has_one_factor_an_element() -> None:
    got = Scaling(np.array([2, 0.5], np.float32)).applied([np.array([3.0, 4.0])], (2,))
    assert next(got).tolist() == [6.0, 2.0]


def test_small_types_are_widened_before_they_are_changed() -> None:
    """One plus a small weight is no bfloat16."""
    stored = np.array([0.01], ml_dtypes.bfloat16)
    scaled = next(Scaling(np.array([0.5], np.float32), shift=1.0).applied([stored], (1,)))
    assert scaled[0] == (np.float32(stored[0]) + np.float32(1)) * np.float32(0.5) - np.float32(1)


@pytest.mark.parametrize(("axis", "shape"), [(0, (3, 2)), (1, (2, 3)), (1, (2,))])
def test_factors_that_do_not_fit_are_refused(axis: int, shape: tuple[int, ...]) -> None:
    factors = np.ones(2, np.float32)
    scaling = Scaling(rows=factors) if axis == 0 else Scaling(columns=factors)
    with pytest.raises(ValueError, match=f"2 factors along axis {axis}"):
        list(scaling.applied([np.ones(6, np.float32)], shape))
