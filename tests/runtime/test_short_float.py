"""The 16-bit numbers of scales, against their definition in runtime/kernels/linear.h."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trtllm_lite.runtime.short_float import LARGEST, LEAST, decoded, encoded, rounded

ALL = np.arange(2**16, dtype=np.uint16)


def defined(code: int) -> float:
    return float(2.0 ** ((code >> 10) - 47) * (1 + (code & 1023) / 1024))


def test_every_code_is_the_number_that_is_defined() -> None:
    values = decoded(ALL)
    assert values.dtype == np.float32
    assert values.tolist() == [defined(code) for code in range(2**16)]
    assert (values[0], values[-1]) == (LEAST, LARGEST)


def test_every_number_comes_back() -> None:
    np.testing.assert_array_equal(encoded(decoded(ALL)), ALL)
    np.testing.assert_array_equal(rounded(decoded(ALL)), decoded(ALL))


def test_every_positive_float16_is_one() -> None:
    halves = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(decoded(encoded(halves)), halves)


@given(st.floats(2.0**-60, LARGEST, width=32))
@example(LARGEST)
@example(LEAST)
@example(float(np.nextafter(np.float32(LEAST), np.float32(0))))
@example(1 - 2.0**-13)
def test_rounding_is_to_the_nearest(value: float) -> None:
    made = float(rounded(np.array([value]))[0])
    if value < LEAST * (1 - 2.0**-12):
        assert made == 0
        return
    table = decoded(ALL).astype(np.float64)
    assert made in table
    assert abs(made - value) == np.abs(table - value).min()


def test_zero_stays_zero_and_is_stored_as_the_least() -> None:
    zeros = np.zeros((2, 3))
    assert rounded(zeros).tolist() == zeros.tolist()
    assert decoded(encoded(zeros)).tolist() == [[LEAST] * 3] * 2


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, 2.0**17, 1e30])
@pytest.mark.parametrize("call", [rounded, encoded])
def test_what_is_no_scale(call: Callable[[npt.NDArray[Any]], Any], bad: float) -> None:
    with pytest.raises(ValueError, match="not a number from 0 to 131008"):
        call(np.array([1.0, bad]))


@pytest.mark.parametrize("between", [1 + 2.0**-11, 1 + 2.0**-20, 3e-15])
def test_what_has_more_digits_is_not_stored(between: float) -> None:
    with pytest.raises(ValueError, match="more than 11 digits"):
        encoded(np.array([1.0, between]))
