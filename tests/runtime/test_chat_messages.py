"""Which chat messages are taken, and what becomes of them."""

from types import MappingProxyType
from typing import Any

import pytest

from trtllm_lite.runtime.chat_messages import check_messages, plain
from trtllm_lite.runtime.errors import RequestError

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "got str; allowed: a list"),
        (None, "got NoneType"),
        ({"role": "user"}, "got dict"),
        ([], "empty list"),
        (["Hi"], r"messages\[0\] is a str"),
        ([USER, {"content": "x"}], r"messages\[1\].role is None; allowed: system, developer"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"role": ["user"], "content": "x"}], r"role is \['user'\]"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": None}], "content is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "content is missing"),
        ([{"role": "user", "content": 5}], "content is a int"),
        ([{"role": "user", "content": {"type": "text"}}], "content is a dict"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is a str"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is not a string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\].content\[0\] is a part of type 'image_url'; this model takes text",
        ),
        ([{"role": "user", "content": "a\ud800"}], "lone surrogate at character 1"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}], "lone surrogate"),
        ([{**USER, "name": "\ud800"}], "lone surrogate"),
        ([{**USER, "x": {"\ud800": 1}}], "lone surrogate"),
        ([{**USER, "x": object()}], "holds a object; allowed: JSON values"),
        ([{**USER, "x": b"bytes"}], "holds a bytes"),
        ([{**USER, "x": {1: 2}}], "holds a dict"),
        ([{"role": "user", "content": "Hi", 1: 2}], "holds a dict"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "tool_calls is not a list of objects"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls is not a list of objects"),
    ],
)
def test_refused(messages: object, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_messages(messages)
    assert caught.value.param == "messages"


def test_nesting_is_bounded() -> None:
    value: list[Any] = []
    for _ in range(100):
        value = [value]
    with pytest.raises(RequestError, match="deeper than 64"):
        check_messages([{**USER, "x": value}])


def test_text_parts_are_joined_with_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_none_values_are_dropped_but_content_is_kept() -> None:
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": [{"id": "1"}]}
    assert check_messages([message]) == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    ]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ("{not json", "{not json"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_tool_call_arguments_become_objects(given: object, kept: object) -> None:
    call = {"function": {"name": "f", "arguments": given}}
    checked = check_messages([{"role": "assistant", "tool_calls": [call]}])
    assert checked[0]["tool_calls"][0]["function"]["arguments"] == kept
    assert call["function"]["arguments"] == given


def test_reasoning_is_known_by_each_of_its_names() -> None:
    message = {"role": "assistant", "content": "A", "reasoning": "R"}
    checked = check_messages([message])[0]
    assert {checked[k] for k in ("reasoning", "reasoning_content", "thinking")} == {"R"}
    assert "reasoning" not in check_messages([USER])[0]


def test_everything_is_rebuilt_from_exact_builtin_types() -> None:
    class Text(str):
        """A string that could carry methods for a template to call."""

    class Count(int):
        pass

    value = MappingProxyType({Text("k"): (Text("v"), Count(3), 1.5, True, None)})
    copy = plain("messages", "x", value)
    assert copy == {"k": ["v", 3, 1.5, True, None]}
    assert type(copy) is dict
    assert [type(k) for k in copy] == [str]
    assert [type(v) for v in copy["k"]] == [str, int, float, bool, type(None)]
