"""What holds for the parsers of all families, whatever the text and however it is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ToolCallArguments,
    ToolCallStart,
    merged,
)
from trtllm_lite.runtime.server.parsers.hermes import HermesParser
from trtllm_lite.runtime.server.parsers.llama3_json import Llama3JsonParser
from trtllm_lite.runtime.server.parsers.mistral import MistralParser
from trtllm_lite.runtime.server.parsers.tool_parser import MAX_HELD, ToolCallParser

NAMES = ("get", "get_more")
FAMILIES = (HermesParser, Llama3JsonParser, MistralParser)
family = pytest.mark.parametrize("family", FAMILIES)
MARKERS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
CALLS = ('{"name": "get", "arguments": {"a": [1, "}"]}}', '{"name": "get_more", "parameters": {}}')
PIECES = st.sampled_from(
    [
        *MARKERS,
        *CALLS,
        "<",
        "</",
        "<tool",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        ",",
        ", ",
        ";",
        ":",
        " ",
        "\n",
        "get",
        "get_more",
        "{}",
        '{"a": 1}',
        '{"name": "get", ',
        '"arguments": {',
        "word",
        "é",
        "<tool_call>\n" + CALLS[0] + "\n</tool_call>",
        "[TOOL_CALLS]get[ARGS]{}",
    ]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def read(parser: ToolCallParser, *pieces: str) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])


def content(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def calls(events: list[Event]) -> list[tuple[str, str]]:
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, ToolCallArguments):
            arguments[event.index] += event.delta
    return list(zip(names, arguments, strict=True))


@family
@given(TEXTS, st.lists(st.integers(0, 60), max_size=6), st.booleans())
@settings(max_examples=120, deadline=None)
def test_cuts_change_nothing(
    family: type[ToolCallParser], text: str, cuts: list[int], eager: bool
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = read(family(NAMES, eager=eager), text)
    assert read(family(NAMES, eager=eager), *pieces) == whole
    assert read(family(NAMES, eager=eager), *text) == whole


@family
@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_calls_are_sound_and_text_without_one_is_content(
    family: type[ToolCallParser], text: str
) -> None:
    parser = family(NAMES)
    events = read(parser, text)
    found = calls(events)
    assert parser.num_calls == len(found)
    place = 0
    for name, arguments in found:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)
        place = text.index(arguments, place) + len(arguments)
    if not found:
        assert content(events) == text


@family
@given(TEXTS)
@settings(max_examples=120, deadline=None)
def test_eager_finds_the_same_calls_when_none_breaks_off(
    family: type[ToolCallParser], text: str
) -> None:
    held, eager = read(family(NAMES), text), read(family(NAMES, eager=True), text)
    assert len(calls(eager)) >= len(calls(held))
    if len(calls(eager)) == len(calls(held)):
        assert eager == held


@family
def test_no_tool_no_call(family: type[ToolCallParser]) -> None:
    text = f"{family.marker}{CALLS[0]}"
    assert calls(read(family(NAMES), text)) == [("get", '{"a": [1, "}"]}')]
    assert read(family(()), text) == [ContentDelta(text)]


@family
def test_eager_arguments_come_before_their_end(family: type[ToolCallParser]) -> None:
    cut = CALLS[0][:-6]
    parser = family(NAMES, eager=True)
    events = parser.feed(family.marker + cut)
    assert events == [ToolCallStart(0, "get"), ToolCallArguments(0, '{"a": [1, ')]
    assert parser.finish() == []
    held = family(NAMES)
    assert held.feed(family.marker + cut) == []
    assert held.finish() == [ContentDelta(family.marker + cut)]


@family
def test_an_eager_call_that_breaks_off_is_followed_by_content(
    family: type[ToolCallParser],
) -> None:
    text = family.marker + '{"name": "get", "arguments": {"a": !}}'
    assert read(family(NAMES, eager=True), text) == [
        ToolCallStart(0, "get"),
        ToolCallArguments(0, '{"a": '),
        ContentDelta("!}}"),
    ]


@family
@pytest.mark.parametrize(
    "beginning", ['{"name": "', '{"id": "', '{"name": "get", "arguments": {"a": "', "   "]
)
def test_what_is_held_back_is_bounded(family: type[ToolCallParser], beginning: str) -> None:
    parser = family(NAMES)
    text = family.marker + beginning
    shown = content(parser.feed(text))
    filler = beginning[-1] if beginning.isspace() else "a"
    for _ in range(40):
        shown += content(parser.feed(filler * 10_000))
        text += filler * 10_000
        assert len(text) - len(shown) <= MAX_HELD
    assert shown + content(parser.finish()) == text


@family
@pytest.mark.parametrize(
    "hostile",
    [
        "<",
        "[",
        "<tool_call>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][",
        "<tool_call>{",
        "{",
        '{"name":"get"',
        "[TOOL_CALLS]get[",
        "[TOOL_CALLS]get[CALL_ID]",
        ";",
        " ",
        "</tool_call>",
        '"',
        "\\",
    ],
)
def test_hostile_repetition_is_read_in_one_go(family: type[ToolCallParser], hostile: str) -> None:
    text = hostile * (30_000 // len(hostile))
    assert read(family(NAMES), text) == [ContentDelta(text)]


@family
def test_plain_text_is_not_delayed(family: type[ToolCallParser]) -> None:
    parser = family(NAMES)
    for word in ("Once", " upon", " a", " time", "\n\n", "{", " <b>"):
        assert content(parser.feed(word)) == word


@family
def test_space_before_text_is_kept_and_space_before_a_call_is_not(
    family: type[ToolCallParser],
) -> None:
    call = family.marker + CALLS[0]
    assert content(read(family(NAMES), "\n\n Hello \n")) == "\n\n Hello \n"
    assert content(read(family(NAMES), "\n\n" + call)) == ""
    assert content(read(family(NAMES), call + "\n\n")) == ""
    assert content(read(family(NAMES), "Hi \n" + call)) == "Hi \n"
    assert content(read(family(NAMES), " " * 100 + call)) != ""
