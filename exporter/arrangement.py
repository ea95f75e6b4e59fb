"""Parameters whose elements stand in another order in the graphs' weights."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Arrangement:
    """The order of a weight's elements: the parameter seen as `shape`, its axes permuted by `perm`
    (as in numpy.transpose), and flat again."""

    shape: tuple[int, ...]
    perm: tuple[int, ...]

    def applied(self, pieces: Iterable[Array], piece_bytes: int) -> Iterator[Array]:
        """The parameter's elements in order, as flat pieces -> those of the weight, in pieces of
        about as many bytes. The whole parameter is held.

        Raises ValueError when the elements do not fill `shape`.
        """
        held = list(pieces)
        whole = held[0] if len(held) == 1 else np.concatenate(held)
        held.clear()
        moved = whole.reshape(self.shape).transpose(self.perm)
        most = max(1, piece_bytes // (prod(moved.shape[1:]) * whole.itemsize))
        for start in range(0, len(moved), most):
            yield np.ascontiguousarray(moved[start : start + most]).reshape(-1)
