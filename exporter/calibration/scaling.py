"""Tensors of a checkpoint multiplied by factors on their way into a bundle."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Scaling:
    """How a tensor [N] or [N, K] changes: (value + shift) * rows[n] * columns[k] - shift.

    rows, columns: float32 [N] and [K], powers of two, so that a product is exact; None for ones.
    shift: 1 for a norm that multiplies by one plus its weight.
    """

    rows: Array | None = None
    columns: Array | None = None
    shift: float = 0.0

    def then(self, other: "Scaling") -> "Scaling":
        """Both, one after the other. Raises ValueError when their shifts differ."""
        if self.shift != other.shift:
            raise ValueError(f"shifts {self.shift} and {other.shift} do not combine")
        return Scaling(
            _product(self.rows, other.rows), _product(self.columns, other.columns), self.shift
        )

    def applied(self, pieces: Iterable[Array], shape: tuple[int, ...]) -> Iterator[Array]:
        """The elements of a tensor of `shape` in order, as flat pieces -> the same, float32.

        Raises ValueError when the factors do not fit the shape.
        """
        for axis, factors in enumerate((self.rows, self.columns)):
            if factors is not None and shape[axis : axis + 1] != factors.shape:
                raise ValueError(f"{len(factors)} factors along axis {axis} of {shape}")
        width, shift, done = int(np.prod(shape[1:])), np.float32(self.shift), 0
        for piece in pieces:
            first, start = divmod(done, width)
            done += len(piece)
            last = -(-done // width)
            here = slice(start, start + len(piece))  # of the rows that the piece touches
            scaled = piece.astype(np.float32) + shift
            if self.rows is not None:
                scaled *= np.repeat(self.rows[first:last], width)[here]
            if self.columns is not None:
                scaled *= np.tile(self.columns, last - first)[here]
            yield scaled - shift


def _product(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    product: Array = a * b
    return product
