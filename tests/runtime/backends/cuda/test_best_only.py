"""Rows of which only the largest logits are known."""

import numpy as np
import numpy.typing as npt
import pytest

from trtllm_lite.runtime.backends.best_only import BestOnly

Bytes = npt.NDArray[np.uint8]


def memory(best: BestOnly, values: list[list[float]], ids: list[list[int]]) -> Bytes:
    """As a graph leaves it."""
    rows = len(values)
    made = np.full(best.nbytes(rows), 0xFF, np.uint8)
    at = best.places(rows)
    for array, start in ((np.array(values, np.float32), at[0]), (np.array(ids, np.int64), at[1])):
        made[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return made


def test_what_is_not_known_is_impossible() -> None:
    best = BestOnly(6, 2)
    logits = best.logits(memory(best, [[3, 1], [2, -4]], [[5, 0], [1, 2]]), 2, 1)
    low = -np.inf
    assert logits.tolist() == [[[1, low, low, low, low, 3]], [[low, 2, -4, low, low, low]]]


def test_nothing_of_the_rows_before_is_left() -> None:
    best = BestOnly(5, 1)
    for rows in (3, 1, 2, 4):
        ids = [[(rows + i) % 5] for i in range(rows)]
        logits = best.logits(memory(best, [[1.0]] * rows, ids), rows, 1)
        assert np.isfinite(logits).sum() == rows
        assert logits.argmax(axis=-1).tolist() == ids


def test_several_logits_a_row() -> None:
    best = BestOnly(4, 1)
    logits = best.logits(memory(best, [[1.0]] * 6, [[i % 4] for i in range(6)]), 3, 2)
    assert logits.shape == (3, 2, 4)
    assert logits.argmax(axis=-1).tolist() == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize(("asked", "enough"), [(0, False), (1, True), (7, True), (8, False)])
def test_when_it_is_enough(asked: int, enough: bool) -> None:
    assert BestOnly(100, 8).is_enough(asked) is enough


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ([4.0, 3.0, 2.0, 1.0], 3),
        ([4.0, 3.0, 1.0, 1.0], 2),  # there may be more of them, with lower tokens
        ([4.0, 4.0, 4.0, 1.0], 3),
        ([1.0, 1.0, 1.0, 1.0], 0),
        ([4.0, 3.0, -np.inf, -np.inf], 2),
        ([np.nan, 3.0, 2.0, 1.0], 0),
        ([4.0, 3.0, 2.0, np.nan], 0),
    ],
)
def test_what_is_known_decides_where_the_last_known_is_smaller(
    values: list[float], most: int
) -> None:
    best = BestOnly(100, 4)
    held = memory(best, [values, [9.0, 8.0, 7.0, 6.0], [0.0] * 4], [[0, 1, 2, 3]] * 3)
    assert [n for n in range(1, 4) if best.decides(held, 2, n, 3)] == list(range(1, most + 1))
    assert not best.decides(held, 3, 1, 3)


def test_a_token_outside_of_the_vocabulary_is_not_written() -> None:
    best = BestOnly(4, 1)
    with pytest.raises(IndexError):
        best.logits(memory(best, [[1.0]], [[4]]), 1, 1)
