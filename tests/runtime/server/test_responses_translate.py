"""Bodies of /v1/responses become conversations; what is wrong with them is named."""

from typing import Any

import pytest

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.capabilities import responses_fields
from trtllm_lite.runtime.server.errors import ApiError
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.protocol.common import REFUSED, check_refused
from trtllm_lite.runtime.server.protocol.responses import (
    LOGPROBS,
    RESPONSES_NO_EFFECT,
    RESPONSES_REFUSED,
    ResponsesRequest,
)
from trtllm_lite.runtime.server.protocol.tool_types import check_tool_types
from trtllm_lite.runtime.server.responses_api.translate import chat_request

TOOL = {"type": "function", "name": "go", "description": "d", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def chat(**fields: Any) -> ChatRequest:
    raw = {"input": "hi", **fields}
    check_refused(raw, RESPONSES_REFUSED, REFUSED)
    check_tool_types(raw, "function")
    return chat_request(ResponsesRequest.parse(raw))


def messages(given: Any, **fields: Any) -> list[dict[str, Any]]:
    return chat(input=given, **fields).messages


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def called(call_id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "go", "arguments": '{"a": 1}'}


def call(call_id: str = "c1") -> dict[str, Any]:
    function = {"name": "go", "arguments": '{"a": 1}'}
    return {"id": call_id, "type": "function", "function": function}


def test_a_text_is_the_users() -> None:
    assert messages("hi") == [text("user", "hi")]
    assert messages("hi", instructions="be brief") == [
        text("system", "be brief"),
        text("user", "hi"),
    ]


def test_items_are_turns() -> None:
    given = [
        text("developer", "d"),
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "b", "annotations": [], "logprobs": None},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        text("user", "c"),
    ]
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "no"}]
    assert messages(given) == [
        text("developer", "d"),
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": parts},
        text("user", "c"),
    ]


def test_thought_word_and_deed_are_one_message() -> None:
    thought: dict[str, Any] = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "encrypted_content": None,
    }
    given = [
        text("user", "a"),
        {
            **thought,
            "encrypted_content": None,
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        text("assistant", "so"),
        called("c1"),
        called("c2"),
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "1"}],
        },
        text("assistant", "done"),
        text("assistant", "really"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "left alone"}]},
    ]
    made = messages(given)
    assert made[1] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [call("c1"), call("c2")],
    }
    tool = {"role": "tool", "name": "go"}
    assert made[2] == {**tool, "tool_call_id": "c2", "content": "2"}
    assert made[3]["content"] == [{"type": "text", "text": "1"}]
    assert made[4:] == [text("assistant", "done"), text("assistant", "really")]


def test_reasoning_that_only_has_a_summary_is_that() -> None:
    thought = [{"type": "summary_text", "text": "in short"}]
    made = messages([{"type": "reasoning", "summary": thought}, called()])
    assert made == [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "in short",
            "tool_calls": [call()],
        }
    ]


def test_tools_have_the_form_of_chat() -> None:
    choice = {"type": "function", "name": "go"}
    made = chat(tools=[{**TOOL, "strict": True}], tool_choice=choice, parallel_tool_calls=False)
    (tool,) = made.tools or []
    function = {"name": "go", "description": "d", "parameters": {"type": "object"}}
    assert tool.model_dump(exclude_unset=True) == {"type": "function", "function": function}
    assert made.tool_choice is not None
    assert made.parallel_tool_calls is False
    assert chat(tools=[]) == chat()
    assert chat(tool_choice="auto", parallel_tool_calls=True) == chat()


def test_fields_have_their_counterparts() -> None:
    made = chat(
        max_output_tokens=5,
        stop=["x"],
        top_k=3,
        seed=1,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
        include=[LOGPROBS],
        top_logprobs=2,
        stream=True,
    )
    assert (made.max_tokens, made.stop, made.top_k, made.seed) == (5, ["x"], 3, 1)
    assert (made.reasoning_effort, made.logprobs, made.top_logprobs) == ("low", True, 2)
    assert made.response_format is not None
    assert made.response_format.json_schema is not None
    assert made.response_format.json_schema.schema_ == SCHEMA
    assert made.stream is True
    assert chat(text={"format": {"type": "text"}, "verbosity": "low"}).guided_json is None


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": None}, "^input"),
        ({"input": 5}, "^input"),
        ({"input": []}, "^input"),
        ({"input": [5]}, "^input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "^input.*role"),
        ({"input": [{"role": "user", "content": 5}]}, "^input.*content"),
        ({"input": IMAGE}, "^input.*'input_image'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "^input.*'item_reference'"),
        ({"input": [{"type": []}]}, "^input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "call_id"),
        ({"tools": [{"type": "web_search"}]}, "^tools.*'web_search'"),
        ({"tools": [{"type": "function", "function": {"name": "go"}}]}, "^tools"),
        ({"tool_choice": "required"}, "^tool_choice"),
        ({"tool_choice": {"type": "function", "name": "go"}}, "^tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "^text.*schema"),
        ({"text": {"format": {"type": "hiccup"}}}, "^text"),
        ({"include": ["reasoning.encrypted_content"]}, "^include"),
        ({"top_logprobs": 2}, "^top_logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "^top_logprobs"),
        ({"max_output_tokens": 0}, "^max_output_tokens"),
        ({"reasoning": {"summary": "detailed"}}, "^reasoning"),
        ({"metadata": {"a": 1}}, "^metadata"),
        ({"metadata": {"a" * 65: "x"}}, "^metadata"),
        ({"truncation": "auto"}, "^truncation"),
        ({"store": True}, "^store.*stores nothing"),
        ({"background": True}, "^background"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "^stream_options"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ApiError, RequestError), match=message) as caught:
        chat(**fields)
    error: Any = caught.value
    assert isinstance(error, RequestError) or error.status == 400


@pytest.mark.parametrize("name", sorted(RESPONSES_REFUSED))
def test_a_refused_field_says_why(name: str) -> None:
    with pytest.raises(ApiError, match="^" + name) as caught:
        chat(**{name: "anything"})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    for neutral in (None, *RESPONSES_REFUSED[name].neutral):
        assert chat(**{name: neutral}) == chat()


def test_capabilities_tell_of_every_field() -> None:
    table = responses_fields(SamplingParams(temperature=0.0), tools=True)
    assert ResponsesRequest.model_fields.keys() <= table.keys()
    assert table["previous_response_id"]["status"] == "refused"
    assert table["metadata"]["status"] == "honoured"
    assert table["input"]["types"] == ["array", "string"]
    assert {table[name]["status"] for name in RESPONSES_NO_EFFECT} == {"no_effect"}
    assert responses_fields(SamplingParams(), tools=False)["tools"]["status"] == "refused"
