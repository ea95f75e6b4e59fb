"""The shipped texts: long enough, apart from each other, cut into whole windows."""

import re
from typing import get_args

import numpy as np
import pytest

from trtllm_lite.exporter.quality.texts import (
    LONG_LAST,
    LONG_WINDOW,
    WINDOW,
    Text,
    long_window,
    read_text,
    text_windows,
)

LEAST = {"quality": 2000, "calibration": 4000}
VOCAB = 300


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def as_bytes(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("name", get_args(Text))
def test_is_long_enough_for_any_tokenizer(name: Text) -> None:
    """No tokenizer in use joins words, so that there are at least as many tokens."""
    assert len(words(read_text(name))) >= LEAST[name]


def test_nothing_that_is_measured_was_fitted_to() -> None:
    size = 8
    quality, calibration = (words(read_text(name)) for name in ("quality", "calibration"))
    seen = {tuple(calibration[i : i + size]) for i in range(len(calibration) - size + 1)}
    assert not [i for i in range(len(quality)) if tuple(quality[i : i + size]) in seen]


@pytest.mark.parametrize("longest", [2, 100, WINDOW, 4096])
def test_windows_hold_the_text_in_order(longest: int) -> None:
    windows = text_windows("quality", as_bytes, VOCAB, longest)
    ids = as_bytes(read_text("quality"))
    assert windows.dtype == np.int64
    assert windows.shape[1] == min(longest, WINDOW)
    assert windows.ravel().tolist() == ids[: windows.size]
    assert len(ids) - windows.size < windows.shape[1]


@pytest.mark.parametrize("longest", [2, 100, WINDOW])
@pytest.mark.parametrize(("before", "after"), [([299], []), ([298, 299], [297]), ([], [297])])
def test_every_window_starts_as_a_text_does(
    longest: int, before: list[int], after: list[int]
) -> None:
    windows = text_windows("quality", lambda t: before + as_bytes(t) + after, VOCAB, longest)
    start = before[: longest - 1]
    assert windows.shape[1] == longest
    assert all(window[: len(start)].tolist() == start for window in windows)
    rest = windows[:, len(start) :].ravel().tolist()
    ids = before[len(start) :] + as_bytes(read_text("quality")) + after
    assert rest == ids[: len(rest)]
    assert len(ids) - len(rest) < longest


def test_without_a_tokenizer_the_ids_are_random_but_the_same() -> None:
    windows = text_windows("quality", None, VOCAB)
    assert np.array_equal(windows, text_windows("quality", None, VOCAB))
    assert not np.array_equal(windows, text_windows("calibration", None, VOCAB))
    assert windows.min() >= 0
    assert windows.max() < VOCAB
    assert len(np.unique(windows)) > VOCAB // 2


def test_one_token_predicts_nothing() -> None:
    with pytest.raises(ValueError, match="predict nothing"):
        text_windows("quality", as_bytes, VOCAB, 1)


@pytest.mark.parametrize("longest", [2 * LONG_LAST + 1, LONG_WINDOW, 8192])
def test_a_long_window_is_the_beginning_of_the_text(longest: int) -> None:
    window = long_window(as_bytes, VOCAB, longest)
    assert window is not None
    assert window.tolist() == as_bytes(read_text("quality"))[: min(longest, LONG_WINDOW)]
    random = long_window(None, VOCAB, longest)
    assert random is not None
    assert random.shape == window.shape
    assert random.max() < VOCAB
    again = long_window(None, VOCAB, longest)
    assert again is not None
    assert np.array_equal(random, again)


def test_what_is_not_long_has_no_long_window() -> None:
    assert long_window(as_bytes, VOCAB, 2 * LONG_LAST) is None
    assert long_window(lambda text: as_bytes(text)[:1000], VOCAB, 8192) is None
