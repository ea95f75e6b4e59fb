"""Parameters in another order, against numpy on the whole tensor."""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.exporter.arrangement import Arrangement
from trtllm_lite.exporter.calibration.scaling import Scaling
from trtllm_lite.exporter.weights import MappedSource

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


class Memory:
    """Tensors in memory, in pieces of three elements."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def pieces(self, name: str) -> Iterator[Any]:
        flat = self._tensors[name].reshape(-1)
        yield from (flat[start : start + 3] for start in range(0, len(flat), 3))


@given(SHAPES, st.randoms(use_true_random=False), st.integers(1, 100))
def test_equals_the_whole_at_once(shape: tuple[int, ...], random: Any, piece_bytes: int) -> None:
    perm = list(range(len(shape)))
    random.shuffle(perm)
    whole = np.arange(prod(shape), dtype=np.float32)
    pieces = np.array_split(whole, random.randint(1, 3))
    made = list(Arrangement(shape, tuple(perm)).applied(pieces, piece_bytes))
    assert np.array_equal(np.concatenate(made), whole.reshape(shape).transpose(perm).reshape(-1))
    smallest = 4 * prod(shape[axis] for axis in perm[1:])
    assert all(piece.ndim == 1 and piece.nbytes <= max(piece_bytes, smallest) for piece in made)


def test_elements_that_do_not_fill_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        list(Arrangement((2, 3), (1, 0)).applied([np.zeros(5, np.float32)], 64))


def test_a_source_scales_a_parameter_before_it_is_arranged() -> None:
    a, b = np.arange(6.0, dtype=np.float32).reshape(2, 3), np.ones((1, 2), np.float32)
    rows = np.array([2.0, 4.0], np.float32)
    source = MappedSource(
        Memory({"a": a, "b": b}),
        {"a": "a", "b": "b"},
        {"a+b": ("a", "b")},
        arrangements={"a": Arrangement((2, 3), (1, 0))},
    ).scaled({"a": Scaling(rows=rows)})
    got = np.concatenate(list(source.pieces("a+b")))
    assert np.array_equal(got, np.concatenate([(rows[:, None] * a).T.reshape(-1), b.reshape(-1)]))
    assert np.array_equal(np.concatenate(list(source.pieces("a"))), got[:6])
    # Checkpoints are checked against the parameter's own shape.
    assert source.shape("a") == (2, 3)
