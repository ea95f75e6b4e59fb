"""Answers as each family of models writes them."""

import json

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
from trtllm_lite.runtime.server.parsers.tool_parser import ToolCallParser

NAMES = ("get", "get_more", "a-b_c.1")
VALUES = st.dictionaries(
    st.text(max_size=5), st.text(max_size=6) | st.integers() | st.lists(st.text(max_size=3))
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.tuples(VALUES, st.sampled_from([None, 2])).map(
            lambda made: json.dumps(made[0], indent=made[1])
        ),
    ),
    min_size=1,
    max_size=4,
)
# Text that is no gap, and holds no marker and no beginning of a closing one.
WORDS = st.text("ab <>{}[]\"';.\n", max_size=12).map(lambda text: f"x{text}")
A, B = '{"name": "get", "arguments": {"a": 1}}', '{"name": "get_more", "parameters": {}}'
GOT_A: list[Event] = [ToolCallStart(0, "get"), ToolCallArguments(0, '{"a": 1}')]
GOT_B: list[Event] = [ToolCallStart(1, "get_more"), ToolCallArguments(1, "{}")]


def read(parser: ToolCallParser, text: str) -> list[Event]:
    return merged([*parser.feed(text), *parser.finish()])


def written(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


def expected(calls: list[tuple[str, str]], before: str = "", after: str = "") -> list[Event]:
    events: list[Event] = [ContentDelta(before)] if before else []
    for i, (name, arguments) in enumerate(calls):
        events += [ToolCallStart(i, name), ToolCallArguments(i, arguments)]
    return [*events, ContentDelta(after)] if after else events


@given(CALLS, WORDS | st.just(""), WORDS | st.just(""), st.sampled_from(["", "\n", " \n\t"]))
@settings(max_examples=60, deadline=None)
def test_hermes(calls: list[tuple[str, str]], before: str, after: str, space: str) -> None:
    tags = [f"<tool_call>{space}{written(*call)}{space}</tool_call>" for call in calls]
    text = before + space.join(tags) + after
    assert read(HermesParser(NAMES), text) == expected(calls, before, after)


@given(CALLS, st.sampled_from([";", "; ", "\n", " ;\n", ""]), st.booleans(), WORDS | st.just(""))
@settings(max_examples=60, deadline=None)
def test_llama3(calls: list[tuple[str, str]], between: str, tag: bool, before: str) -> None:
    objects = [written(*call, "parameters") for call in calls]
    text = between.join(objects)
    if tag:
        assert read(Llama3JsonParser(NAMES), f"{before}<|python_tag|>{text}") == expected(
            calls, before
        )
    else:
        assert read(Llama3JsonParser(NAMES), f"\n {text}") == expected(calls)


@given(CALLS, st.sampled_from(["", " ", "\n"]), WORDS | st.just(""), WORDS | st.just(""))
@settings(max_examples=60, deadline=None)
def test_mistral_list(calls: list[tuple[str, str]], space: str, before: str, after: str) -> None:
    inner = f"{space},{space}".join(written(*call) for call in calls)
    text = f"{before}[TOOL_CALLS]{space}[{space}{inner}{space}]{after}"
    assert read(MistralParser(NAMES), text) == expected(calls, before, after)


@given(CALLS, st.sampled_from(["", "[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]"]), WORDS | st.just(""))
@settings(max_examples=60, deadline=None)
def test_mistral_arguments(calls: list[tuple[str, str]], tag: str, before: str) -> None:
    text = before + "".join(f"[TOOL_CALLS]{name}{tag}{args}" for name, args in calls)
    assert read(MistralParser(NAMES), text) == expected(calls, before)


@pytest.mark.parametrize("end", ["", "</tool_call>", "\n</tool_call>\n", "</tool_c", "\n<"])
def test_hermes_needs_no_closing_tag(end: str) -> None:
    assert read(HermesParser(NAMES), f"<tool_call>{A}{end}") == GOT_A


def test_hermes_tags_may_be_missing_between_calls() -> None:
    assert read(HermesParser(NAMES), f"<tool_call>{A}<tool_call>{B}</tool_call>") == GOT_A + GOT_B


@pytest.mark.parametrize(
    "before",
    [
        "</tool_call>",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>oops</tool_call>\n",
        '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"a": }}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"a": "\n',
    ],
)
def test_hermes_goes_on_after_a_malformed_call(before: str) -> None:
    text = f"{before}<tool_call>{A}</tool_call>"
    assert read(HermesParser(NAMES), text) == [ContentDelta(before), *GOT_A]


def test_hermes_marker_inside_of_a_string_is_text() -> None:
    arguments = '{"a": "<tool_call>{</tool_call>"}'
    call = written("get", arguments)
    assert read(HermesParser(NAMES), f"<tool_call>{call}</tool_call>") == expected(
        [("get", arguments)]
    )


def test_hermes_text_after_a_call_and_a_second_closing_tag_are_content() -> None:
    text = f"<tool_call>{A}</tool_call></tool_call> and"
    assert read(HermesParser(NAMES), text) == [*GOT_A, ContentDelta("</tool_call> and")]


@pytest.mark.parametrize(
    "answer", ['{"answer": 42}', '{"name": "Ann", "age": 3}', "{", "{}", '[{"name": "get"}]']
)
def test_llama3_json_that_is_no_call_is_an_answer(answer: str) -> None:
    assert read(Llama3JsonParser(NAMES), answer) == [ContentDelta(answer)]


def test_llama3_calls_come_first_or_after_the_tag() -> None:
    assert read(Llama3JsonParser(NAMES), f"Try {A}") == [ContentDelta(f"Try {A}")]
    assert read(Llama3JsonParser(NAMES), f"Try <|python_tag|>{A}") == [
        ContentDelta("Try "),
        *GOT_A,
    ]


def test_llama3_what_follows_a_call() -> None:
    assert read(Llama3JsonParser(NAMES), f"{A};") == GOT_A
    assert read(Llama3JsonParser(NAMES), f"{A}; done") == [*GOT_A, ContentDelta("; done")]
    assert read(Llama3JsonParser(NAMES), f"{A};; {B}") == [*GOT_A, ContentDelta(f";; {B}")]
    assert read(Llama3JsonParser(NAMES), f";{A}") == [ContentDelta(f";{A}")]


def test_llama3_python_is_content() -> None:
    text = '<|python_tag|>brave_search.call(query="x")'
    assert read(Llama3JsonParser(NAMES), text) == [ContentDelta(text)]


def test_mistral_takes_a_single_object() -> None:
    assert read(MistralParser(NAMES), f"[TOOL_CALLS]{A}") == GOT_A


@pytest.mark.parametrize(
    ("end", "content"),
    [("", ""), ("]", ""), ("] done", " done"), (", 1]", ", 1]"), (",", ","), ("}", "}")],
)
def test_mistral_list_that_ends_in_another_way(end: str, content: str) -> None:
    expected_end = [ContentDelta(content)] if content else []
    assert read(MistralParser(NAMES), f"[TOOL_CALLS] [{A}{end}") == [*GOT_A, *expected_end]


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS]nope[ARGS]{}",
        "[TOOL_CALLS]get",
        "[TOOL_CALLS]get[ARG]{}",
        "[TOOL_CALLS]get[ARGS]1",
        "[TOOL_CALLS]get[CALL_ID]a-b[ARGS]{}",
        "[TOOL_CALLS]ge{}",
        "[ARGS]{}",
    ],
)
def test_mistral_malformed_calls_are_content(text: str) -> None:
    assert read(MistralParser(NAMES), text) == [ContentDelta(text)]


def test_mistral_two_lists() -> None:
    assert read(MistralParser(NAMES), f"[TOOL_CALLS][{A}] [TOOL_CALLS][{B}]") == GOT_A + GOT_B
