"""What is the object of a call, and what is not."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.server.parsers.call_reader import ArgumentsObject, CallObject, CallReader

NAMES = frozenset(("get", "get_weather"))
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def takes(reader: CallReader, text: str) -> bool:
    return all(reader.step(char) for char in text)


def read(reader: CallReader, text: str) -> tuple[str, str] | None:
    """The call, when the whole text is one and is not one before its end."""
    if not takes(reader, text[:-1]) or reader.done or not reader.step(text[-1]):
        return None
    assert reader.name is not None
    return (reader.name, reader.take()) if reader.done else None


@given(
    st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    st.sampled_from(["arguments", "parameters"]),
    st.permutations(["name", "arguments", "id", "type"]),
    st.sampled_from([None, 1]),
    VALUES,
)
@settings(max_examples=100, deadline=None)
def test_reads_any_call(
    arguments: dict[str, object], key: str, order: list[str], indent: int | None, other: object
) -> None:
    written = json.dumps(arguments, indent=indent)
    texts = {"name": '"get"', key: written, "id": json.dumps(other), "type": json.dumps(other)}
    # What comes last in the order is left out, unless it is needed.
    keys = [key if each == "arguments" else each for each in order]
    kept = [each for each in keys if each != keys[-1] or each in ("name", key)]
    text = "{" + ",\n".join(f'"{each}" : {texts[each]}' for each in kept) + " }"
    assert read(CallObject(NAMES), text) == ("get", written)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"name": "get"}',
        '{"arguments": {}}',
        '{"name": "other", "arguments": {}}',
        '{"name": "ge", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": ["get"], "arguments": {}}',
        '{"name": "get", "arguments": []}',
        '{"name": "get", "arguments": "{}"}',
        '{"name": "get", "arguments": null}',
        '{"name": "get", "arguments": {}, "more": 1}',
        '{"name": "get", "name": "get", "arguments": {}}',
        '{"name": "get", "arguments": {}, "parameters": {}}',
        '{"name": "get", "arguments": {"a": }}',
        '{"name": "get" "arguments": {}}',
        '{"id": {"name": "get", "arguments": {}}}',
    ],
)
def test_refuses_what_is_no_call(text: str) -> None:
    assert read(CallObject(NAMES), text) is None


def test_escapes_in_keys_and_names_count_as_what_they_stand_for() -> None:
    text = '{"n\\u0061me": "g\\u0065t", "arguments": {"a": "\\u00e9"}}'
    assert read(CallObject(NAMES), text) == ("get", '{"a": "\\u00e9"}')


def test_a_strange_key_or_name_ends_it_at_once() -> None:
    assert takes(CallObject(NAMES), '{"answer')
    assert not takes(CallObject(NAMES), '{"answer"')
    assert takes(CallObject(NAMES), '{"name": "get_weather"')
    assert not takes(CallObject(NAMES), '{"name": "get_weathers"')


def test_arguments_come_as_they_are_read() -> None:
    reader = CallObject(NAMES)
    assert takes(reader, '{"name": "get", "arguments": {"a": ')
    assert (reader.name, reader.take(), reader.done) == ("get", '{"a": ', False)
    assert takes(reader, "[1]}, ")
    assert (reader.take(), reader.done) == ("[1]}", False)
    assert takes(reader, '"id": "x"}')
    assert (reader.take(), reader.done) == ("", True)


def test_bare_arguments() -> None:
    assert read(ArgumentsObject("get"), '{"a": {"b": 1}}') == ("get", '{"a": {"b": 1}}')
    assert read(ArgumentsObject("get"), "[1]") is None
    assert read(ArgumentsObject("get"), '{"a": 01}') is None
