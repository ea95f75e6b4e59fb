"""Reasoning told apart from the answer, against a split of the whole text."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    merged,
)
from trtllm_lite.runtime.server.parsers.reasoning import ReasoningSplitter, opens_reasoning

PIECES = st.sampled_from(
    ["<think>", "</think>", "<", "</", "<thi", "</thin", "nk>", "\n", " ", "a", "é"]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)
WHITESPACE = " \n"


def read(splitter: ReasoningSplitter, *pieces: str) -> list[Event]:
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return merged([*events, *splitter.finish()])


def whole(text: str, opened: bool) -> tuple[str, str]:
    """(reasoning, content), as one sees them with all the text at hand."""
    start = text.lstrip(WHITESPACE)
    if start.startswith("<think>"):
        text, opened = start.removeprefix("<think>"), True
    if not opened:
        return "", text
    reasoning, _, content = text.partition("</think>")
    return reasoning.strip(WHITESPACE), content.lstrip(WHITESPACE)


def joined(events: list[Event]) -> tuple[str, str]:
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return reasoning, "".join(event.text for event in events if isinstance(event, ContentDelta))


@given(TEXTS, st.booleans())
@settings(max_examples=100, deadline=None)
def test_finds_what_a_split_of_the_whole_text_finds(text: str, opened: bool) -> None:
    assert joined(read(ReasoningSplitter(opened=opened), text)) == whole(text, opened)


@given(TEXTS, st.lists(st.integers(0, 40), max_size=5), st.booleans())
@settings(max_examples=120, deadline=None)
def test_cuts_change_nothing(text: str, cuts: list[int], opened: bool) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    expected = read(ReasoningSplitter(opened=opened), text)
    assert read(ReasoningSplitter(opened=opened), *pieces) == expected
    assert read(ReasoningSplitter(opened=opened), *text) == expected


def test_reasoning_is_shown_as_it_comes() -> None:
    splitter = ReasoningSplitter(opened=True)
    assert splitter.feed("\nFirst") == [ReasoningDelta("First")]
    assert splitter.feed(", then") == [ReasoningDelta(", then")]
    assert splitter.feed("\n</thi") == []
    assert splitter.feed("nk>\n\nSo") == [ContentDelta("So")]
    assert splitter.feed(" be it </think>") == [ContentDelta(" be it </think>")]
    assert splitter.finish() == []


def test_tells_whether_the_text_ends_in_reasoning() -> None:
    splitter = ReasoningSplitter(opened=False)
    seen = []
    for piece in ("<thi", "nk>", "a", "</think>", "\n", "b"):
        splitter.feed(piece)
        seen.append(splitter.inside)
    assert seen == [False, True, True, False, False, False]
    assert ReasoningSplitter(opened=True).inside


@pytest.mark.parametrize(
    "text", [" " * 200, "a" + " " * 200 + "b", "</think" * 200, "<think" * 200]
)
def test_what_is_held_back_is_bounded(text: str) -> None:
    for opened in (False, True):
        splitter = ReasoningSplitter(opened=opened)
        shown = sum(map(len, joined(splitter.feed(text))))
        # White space before reasoning is dropped.
        assert len(text) - shown <= 80 or (opened and text.isspace())


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_the_prompt_tells_whether_reasoning_is_open(prompt: str, opened: bool) -> None:
    assert opens_reasoning(prompt) is opened
