"""Joining events, and ids of calls."""

import re

from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merged,
    new_call_id,
)


def test_joins_neighbours_of_one_kind() -> None:
    events: list[Event] = [
        ReasoningDelta("a"),
        ReasoningDelta("b"),
        ContentDelta("c"),
        ContentDelta("d"),
        ToolCallStart(0, "f"),
        ToolCallArguments(0, "{"),
        ToolCallArguments(0, "}"),
        ContentDelta("e"),
    ]
    assert merged(events) == [
        ReasoningDelta("ab"),
        ContentDelta("cd"),
        ToolCallStart(0, "f"),
        ToolCallArguments(0, "{}"),
        ContentDelta("e"),
    ]


def test_keeps_calls_apart() -> None:
    events: list[Event] = [ToolCallStart(0, "f"), ToolCallStart(1, "f")]
    events += [ToolCallArguments(0, "{}"), ToolCallArguments(1, "{}")]
    assert merged(events) == events


def test_call_ids_are_24_hexadecimal_digits_each_new() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", each) for each in ids)
