"""Weights that a graph multiplies by after DequantizeLinear: [K, N], symmetric, no zero points.

Each block along K has a scale for each column. Sources: ONNX operators, DequantizeLinear-21,
`block_size`; FP8 formats, arXiv:2209.05433.
"""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_lite.exporter.quantize.quantizer import Quantizer, blocked, finite, short_scale

FLOAT8 = ml_dtypes.float8_e4m3fn
LARGEST_FLOAT8 = 448.0

Array = npt.NDArray[Any]


class DequantizedEncoder:
    """Integers of `bits` from a quantizer whose grids are symmetric. Rows become columns, so the
    whole weight has to be held: N * K bytes. Parts: `name`, packed by pairs where bits are 4, and
    `name`_scale [K / block, N] float32."""

    def __init__(
        self,
        name: str,
        bits: int,
        block: int,
        size: tuple[int, int],
        quantizer: Quantizer,
        scales: str = "float32",
    ) -> None:
        self._name, self._bits, self._block, self._quantizer = name, bits, block, quantizer
        self._scales = scales
        rows, columns = size
        self._weight = np.empty((columns, rows), np.int8)
        self._scale = np.empty((columns // block, rows), np.float32)
        self._done = 0

    def add(self, name: str, rows: Array) -> Array:
        """Nothing before the last rows were added, then all. Raises ValueError for a quantizer
        whose zero is not in the middle."""
        made = self._quantizer.quantize(name, rows, self._bits, self._block, self._scales)
        middle = 2 ** (self._bits - 1)
        if not (made.zero == middle).all():
            raise ValueError(f"{name} has zero points; symmetric integers are needed")
        stop = self._done + len(rows)
        self._weight[:, self._done : stop] = (made.q.astype(np.int16) - middle).T
        self._scale[:, self._done : stop] = made.scale.T
        self._done = stop
        if stop < self._weight.shape[1]:
            return np.empty(0, np.uint8)
        return self._weight if self._bits == 8 else _pairs(self._weight)

    def rest(self) -> dict[str, Array]:
        return {f"{self._name}_scale": self._scale}


class Float8Encoder:
    """The nearest numbers of type float8e4m3fn, of which the largest of a block is the largest.
    Parts as of `DequantizedEncoder`."""

    def __init__(
        self, name: str, block: int, size: tuple[int, int], scales: str = "float32"
    ) -> None:
        rows, columns = size
        self._name, self._block, self._scales = name, block, scales
        self._weight = np.empty((columns, rows), FLOAT8)
        self._scale = np.empty((columns // block, rows), np.float32)
        self._done = 0

    def add(self, name: str, rows: Array) -> Array:
        """Nothing before the last rows were added, then all."""
        blocks = blocked(finite(name, rows), self._block)
        largest = np.abs(blocks).max(axis=-1)
        scale = short_scale(name, largest / np.float32(LARGEST_FLOAT8), self._scales)
        inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
        steps = np.clip(blocks * inverse[..., None], -LARGEST_FLOAT8, LARGEST_FLOAT8)
        stop = self._done + len(rows)
        self._weight[:, self._done : stop] = steps.reshape(rows.shape).astype(FLOAT8).T
        self._scale[:, self._done : stop] = scale.T
        self._done = stop
        return self._weight if stop == self._weight.shape[1] else self._weight[:0]

    def rest(self) -> dict[str, Array]:
        return {f"{self._name}_scale": self._scale}


def _pairs(values: Array) -> Array:
    """int8 in -8..7 -> bytes of two, the first in the low half, in the order of the elements."""
    flat = np.pad(values.reshape(-1), (0, values.size % 2)).view(np.uint8) & 0xF
    made: Array = flat[0::2] | (flat[1::2] << 4)
    return made
