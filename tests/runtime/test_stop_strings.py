"""Stop strings found one character at a time, against a search of the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.stop_strings import StopMatcher

TEXT = st.text("ab", max_size=25)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def first_completed(text: str, stops: list[str], after: int = 0) -> tuple[int, str] | None:
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


@given(TEXT, STOPS, st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_finds_what_a_search_of_the_whole_text_finds(
    text: str, stops: list[str], size: int
) -> None:
    matcher = StopMatcher(stops)
    expected = first_completed(text, stops)
    for start in range(0, len(text), size):
        found = matcher.feed(text[start : start + size])
        if found is not None:
            assert (start + found[0], found[1]) == expected
            return
        assert matcher.hold == longest_beginning(text[: start + size], stops)
    assert expected is None


@given(TEXT, TEXT, STOPS)
@settings(max_examples=200, deadline=None)
def test_unarmed_text_completes_nothing_but_may_begin_a_stop(
    before: str, after: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed(before, armed=False) is None
    assert matcher.hold == longest_beginning(before, stops)
    expected = first_completed(before + after, stops, after=len(before))
    found = matcher.feed(after)
    shifted = None if found is None else (len(before) + found[0], found[1])
    assert shifted == expected


def test_a_long_repetitive_stop_costs_little() -> None:
    # A search that begins anew at each place would need 10**10 comparisons.
    matcher = StopMatcher(["a" * 100_000 + "b"])
    assert matcher.feed("a" * 200_000) is None
    assert matcher.hold == 100_000
    assert matcher.feed("ab") == (2, "a" * 100_000 + "b")
