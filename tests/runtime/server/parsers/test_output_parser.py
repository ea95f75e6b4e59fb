"""Reasoning and tool calls of one answer."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.server.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merged,
)
from trtllm_lite.runtime.server.parsers.hermes import HermesParser
from trtllm_lite.runtime.server.parsers.output_parser import OutputParser
from trtllm_lite.runtime.server.parsers.reasoning import ReasoningSplitter

CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'


def parser(*, reasoning: bool = True, tools: bool = True) -> OutputParser:
    return OutputParser(
        ReasoningSplitter(opened=False) if reasoning else None,
        HermesParser(("get",)) if tools else None,
    )


def read(parser: OutputParser, *pieces: str) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])


def test_reasoning_then_text_then_a_call() -> None:
    text = f"<think>\nCall {CALL}?\n</think>\n\nI will.\n{CALL}"
    parts = parser()
    assert read(parts, *text) == [
        ReasoningDelta(f"Call {CALL}?"),
        ContentDelta("I will.\n"),
        ToolCallStart(0, "get"),
        ToolCallArguments(0, '{"a": 1}'),
    ]
    assert parts.num_calls == 1


def test_a_parser_that_is_missing_leaves_its_part_to_the_content() -> None:
    text = f"<think>a</think>{CALL}"
    assert read(parser(reasoning=False), text)[0] == ContentDelta("<think>a</think>")
    assert read(parser(tools=False), text) == [ReasoningDelta("a"), ContentDelta(CALL)]
    assert read(OutputParser(), text, "", "b") == [ContentDelta(text + "b")]
    assert OutputParser().num_calls == 0


def test_what_reasoning_holds_back_reaches_the_tools_at_the_end() -> None:
    assert read(parser(), "<think") == [ContentDelta("<think")]
    assert read(parser(), "<think>a</think") == [ReasoningDelta("a</think")]
    assert read(parser(), f"{CALL[:-3]}")[-1] == ToolCallArguments(0, '{"a": 1}')


def test_reasoning_is_told_while_it_lasts() -> None:
    parts = parser()
    parts.feed("<think>a")
    assert parts.reasoning
    parts.feed("</think>b")
    assert not parts.reasoning
    assert not OutputParser().reasoning


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", CALL, "<tool_call>", "\n", "a", "<", '{"']),
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_cuts_change_nothing(pieces: list[str]) -> None:
    assert (
        read(parser(), *pieces)
        == read(parser(), "".join(pieces))
        == read(parser(), *"".join(pieces))
    )
