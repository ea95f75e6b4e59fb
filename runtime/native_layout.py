"""How the native kernels want a quantized weight to lie, and the way there from weights.bin.

The layout is the one that `runtime/kernels/linear.h` describes; this is its only other owner.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.short_float import encoded

PANEL = 32
"""Output features that lie together."""
GROUP = 4
"""Inputs of one feature that lie together: one dot product of the processor."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Packing:
    """One weight [n, k] with `bits` bits a value in blocks of `block` along k.

    gated: the first half of the rows are gates, the second half what they multiply; a panel then
    holds 16 of each, in the same order.
    """

    n: int
    k: int
    bits: int
    block: int
    gated: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.k // self.block)

    @property
    def panels(self) -> int:
        return -(-self.n // 2 // (PANEL // 2)) if self.gated else -(-self.n // PANEL)

    @property
    def codes_shape(self) -> tuple[int, int]:
        """uint8 [panels, bytes of a panel]"""
        return self.panels, PANEL * self.blocks * self.block * self.bits // 8

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        """uint16 [panels, blocks, PANEL], as `short_float` has it."""
        return self.panels, self.blocks, PANEL

    @property
    def zero_shape(self) -> tuple[int, int, int]:
        """uint8 [panels, blocks, PANEL / 2]: two 4-bit values a byte, half a panel apart."""
        return self.panels, self.blocks, PANEL // 2

    @property
    def source_row_bytes(self) -> int:
        """Bytes of one row's codes in weights.bin: whole blocks, two 4-bit values a byte."""
        return self.blocks * self.block * self.bits // 8

    @property
    def source_zero_bytes(self) -> int:
        """Bytes of one row's zero points in weights.bin: two to a byte."""
        return -(-self.blocks // 2)

    def rows_of(self, first: int, last: int) -> Array:
        """Row of the weight for each place in panels [first, last); -1 where there is none."""
        if not self.gated:
            rows = np.arange(first * PANEL, last * PANEL)
            return np.where(rows < self.n, rows, -1)
        half, width = self.n // 2, PANEL // 2
        gates = np.arange(first * width, last * width).reshape(-1, width)
        gates = np.where(gates < half, gates, -1)
        ups = np.where(gates >= 0, gates + half, -1)
        return np.concatenate([gates, ups], axis=1).reshape(-1)

    def packed(
        self, codes: Array, scale: Array, zero: Array | None, panels: int = 64
    ) -> Iterator[tuple[Array, Array, Array | None]]:
        """Codes, scales and zero points of the next few panels, in order.

        codes: uint8 [n, source_row_bytes]; scale: float32 [n, blocks]; zero: uint8
        [n, source_zero_bytes], of 4 bits only. Raises ValueError for a scale that has no place in
        16 bits.
        """
        for first in range(0, self.panels, panels):
            rows = self.rows_of(first, min(first + panels, self.panels))
            there = rows >= 0
            s = _panels(encoded(scale[rows] * there[:, None]))
            q = np.where(there[:, None], codes[rows], np.uint8(128 if self.bits == 8 else 0))
            yield self._codes(q), s, None if zero is None else self._zeros(zero[rows], there)

    def _zeros(self, rows: Array, there: Array) -> Array:
        values = _panels(_halves(rows)[:, : self.blocks] * there[:, None].astype(np.uint8))
        half = PANEL // 2
        return np.ascontiguousarray(values[:, :, :half] | (values[:, :, half:] << 4))

    def _codes(self, rows: Array) -> Array:
        if self.bits == 8:
            grouped = rows.reshape(-1, PANEL, rows.shape[1] // GROUP, GROUP)
            return np.ascontiguousarray(grouped.transpose(0, 2, 1, 3)).reshape(len(grouped), -1)
        values = _halves(rows)
        pairs = values.reshape(-1, PANEL, values.shape[1] // (2 * GROUP), 2, GROUP)
        made = pairs[:, :, :, 0] | (pairs[:, :, :, 1] << 4)
        return np.ascontiguousarray(made.transpose(0, 2, 1, 3)).reshape(len(made), -1)


def _halves(packed: Array) -> Array:
    """Bytes [.., m] -> the two 4-bit values of each, low half first, [.., 2 m]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _panels(values: Array) -> Array:
    """[rows, blocks] -> [panels, blocks, PANEL]"""
    return np.ascontiguousarray(values.reshape(-1, PANEL, values.shape[1]).transpose(0, 2, 1))
