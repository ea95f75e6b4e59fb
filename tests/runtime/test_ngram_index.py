"""The n-gram index against a scan of the whole sequence."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.ngram_index import Match, NgramIndex


def scan(tokens: Sequence[int], shortest: int, longest: int, most: int) -> Match | None:
    """The same by looking at every place, the last one first."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[len(tokens) - length :]:
                followed = list(tokens)
                for i in range(place, place + most):
                    followed.append(followed[i])
                return Match(length, tuple(followed[len(tokens) :]))
    return None


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    data=st.data(),
)
def test_every_match_is_the_one_that_a_scan_finds(
    tokens: list[int], shortest: int, more: int, data: st.DataObject
) -> None:
    index, length = NgramIndex(shortest, shortest + more), 0
    while length < len(tokens):
        length += data.draw(st.integers(1, len(tokens) - length))
        most = data.draw(st.integers(1, 9))
        found = index.match(tokens[:length], most)
        assert found == scan(tokens[:length], shortest, shortest + more, most)


def test_a_continuation_that_reaches_the_end_goes_on_as_a_loop() -> None:
    assert NgramIndex(2, 4).match([1, 2, 3, 1, 2, 3], 7) == Match(3, (1, 2, 3, 1, 2, 3, 1))


def test_the_last_place_and_the_longest_run_count() -> None:
    last = [1, 2, 7, 0, 1, 2, 8, 0, 1, 2]
    assert NgramIndex(2, 2).match(last, 1) == Match(2, (8,))
    longer = [5, 1, 2, 7, 0, 1, 2, 8, 5, 1, 2]
    assert NgramIndex(2, 3).match(longer, 1) == Match(3, (7,))


def test_what_has_not_been_said_before_has_no_match() -> None:
    index = NgramIndex(2, 4)
    assert index.match([1], 4) is None
    assert index.match([1, 1], 4) is None
    assert index.match([1, 1, 1], 2) == Match(2, (1, 1))
