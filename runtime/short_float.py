"""Numbers of 16 bits for the scales of quantized weights, as `runtime/kernels/linear.h` reads them.

No sign; an exponent e of 6 bits, then a fraction f of 10 bits: 2^(e - 47) (1 + f / 1024). Every
positive float16 is one, and 0 is not: what it is multiplied with has to be 0 already.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

LEAST = 2.0**-47
"""Smaller numbers count as 0."""
LARGEST = 2.0**17 * (1 - 2.0**-11)

_DROPPED = 13  # bits of a float32's fraction that there is no room for
_OFFSET = (127 - 47) << 23

Floats = npt.NDArray[np.float32]
Shorts = npt.NDArray[np.uint16]


def rounded(values: npt.NDArray[Any]) -> Floats:
    """The nearest numbers, as float32; 0 for what is under `LEAST`. Raises ValueError for a
    negative number, NaN, and what is over `LARGEST`."""
    given = np.ascontiguousarray(values, np.float32)
    if not ((given >= 0) & (given <= LARGEST)).all():
        raise ValueError(f"a scale is not a number from 0 to {LARGEST:g}")
    bits = given.view(np.uint32) + np.uint32(1 << (_DROPPED - 1))
    near = (bits >> np.uint32(_DROPPED) << np.uint32(_DROPPED)).view(np.float32)
    return np.where(near < np.float32(LEAST), np.float32(0), near)


def encoded(values: npt.NDArray[Any]) -> Shorts:
    """uint16. 0 becomes `LEAST`. Raises ValueError for what is not one of these numbers."""
    given = np.ascontiguousarray(values, np.float32)
    if not np.array_equal(rounded(given), given):
        raise ValueError("a scale has more than 11 digits of two")
    at_least = np.maximum(given, np.float32(LEAST))
    bits = at_least.view(np.uint32) - np.uint32(_OFFSET)
    return (bits >> np.uint32(_DROPPED)).astype(np.uint16)


def decoded(codes: npt.NDArray[np.uint16]) -> Floats:
    """float32, exactly."""
    bits = (codes.astype(np.uint32) << np.uint32(_DROPPED)) + np.uint32(_OFFSET)
    return bits.view(np.float32)
