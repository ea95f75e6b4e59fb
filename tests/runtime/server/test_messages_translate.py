"""Bodies of /v1/messages become conversations; what is wrong with them is named."""

from typing import Any

import pytest

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.capabilities import count_fields, messages_fields
from trtllm_lite.runtime.server.errors import ApiError
from trtllm_lite.runtime.server.messages_api.thinking import thinking_variables
from trtllm_lite.runtime.server.messages_api.translate import chat_request
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.protocol.common import REFUSED, check_refused
from trtllm_lite.runtime.server.protocol.messages import (
    MESSAGES_NO_EFFECT,
    MESSAGES_REFUSED,
    CountTokensRequest,
    MessagesRequest,
    Thinking,
)
from trtllm_lite.runtime.server.protocol.tool_types import check_tool_types

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "go", "description": "d", "input_schema": SCHEMA}
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatRequest:
    raw = {"messages": [USER], "max_tokens": 9, **fields}
    check_refused(raw, MESSAGES_REFUSED, REFUSED)
    check_tool_types(raw, "custom")
    return chat_request(MessagesRequest.parse(raw), frozenset(), reasons=False)


def messages(*given: Any, **fields: Any) -> list[dict[str, Any]]:
    return chat(messages=list(given), **fields).messages


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}


def use(use_id: str = "t1") -> dict[str, Any]:
    return {"type": "tool_use", "id": use_id, "name": "go", "input": {"a": "b"}}


def result(use_id: str = "t1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": use_id, **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_a_system_prompt_is_a_message_in_front() -> None:
    for system in ("be\nbrief", [text("be"), text("brief")]):
        assert messages(USER, system=system) == [{"role": "system", "content": "be\nbrief"}, USER]
    assert messages(USER, system="") == messages(USER, system=[]) == [USER]
    later = {"role": "system", "content": [text("now"), text("this")]}
    assert messages(USER, later)[1] == {"role": "system", "content": "now\nthis"}


def test_neighbours_of_one_role_are_one_turn() -> None:
    made = messages(USER, user(text("a"), text("b")), assistant(text("c")), USER)
    assert [m["content"] for m in made] == ["hi\na\nb", "c", "hi"]
    assert [m["role"] for m in made] == ["user", "assistant", "user"]


def test_calls_and_their_results_are_messages() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    made = messages(
        USER,
        assistant(
            thought, {"type": "redacted_thinking", "data": "x"}, text("so"), use(), use("t2")
        ),
        user(result("t2", content=[text("2"), text("3")]), result(content="1"), text("and now?")),
        assistant(use("t3")),
        user(result("t3", content="no", is_error=True), result("t1")),
    )
    function = {"name": "go", "arguments": {"a": "b"}}
    call = {"type": "function", "function": function}
    assert made[1] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "t1", **call}, {"id": "t2", **call}],
    }
    tool = {"role": "tool", "name": "go"}
    assert made[2:5] == [
        {**tool, "tool_call_id": "t2", "content": "2\n3"},
        {**tool, "tool_call_id": "t1", "content": "1"},
        {"role": "user", "content": "and now?"},
    ]
    assert made[5] == {"role": "assistant", "content": "", "tool_calls": [{"id": "t3", **call}]}
    assert [m["content"] for m in made[6:]] == ["Error: no", ""]


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    assert chat(messages=[USER, assistant(text("x"))]).continue_final_message
    assert not chat(messages=[USER, assistant(text("x")), USER]).continue_final_message


def test_tools_have_the_form_of_chat() -> None:
    made = chat(tools=[{**TOOL, "type": "custom"}], tool_choice={"type": "any"})
    (tool,) = made.tools or []
    function = {"name": "go", "description": "d", "parameters": SCHEMA}
    assert tool.model_dump(exclude_unset=True) == {"type": "function", "function": function}
    assert (made.tool_choice, made.parallel_tool_calls) == ("required", None)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    made = chat(tools=[TOOL], tool_choice=one)
    assert (made.tool_choice, made.parallel_tool_calls) == ("auto", False)
    named: Any = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "go"}).tool_choice
    assert named.function.name == "go"
    assert chat(tools=[], tool_choice={"type": "none"}) == chat()


def test_fields_have_their_counterparts() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    made = chat(
        stop_sequences=["x"],
        top_k=3,
        top_p=0.5,
        seed=1,
        stream=True,
        output_config={"format": form, "effort": "low"},
    )
    assert (made.max_tokens, made.stop, made.top_k, made.top_p) == (9, ["x"], 3, 0.5)
    assert (made.seed, made.stream, made.reasoning_effort) == (1, True, "low")
    assert made.response_format is not None
    assert made.response_format.json_schema is not None
    assert made.response_format.json_schema.schema_ == SCHEMA


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "^messages"),
        ({"messages": []}, "^messages"),
        ({"messages": "hi"}, "^messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "^messages.*role"),
        ({"messages": [{"role": "system", "content": [use()]}]}, "^messages.*tool_use"),
        ({"messages": [{"role": "user", "content": 5}]}, "^messages.*content"),
        ({"messages": [user(IMAGE)]}, "^messages.*'image'"),
        ({"messages": [user({"type": "document"})]}, "^messages.*'document'"),
        ({"messages": [user(result(content=[IMAGE]))]}, "^messages.*content"),
        ({"messages": [user(use())]}, "^messages.*tool_use belongs to the assistant"),
        ({"messages": [assistant(result()), USER]}, "^messages.*tool_result belongs to the user"),
        ({"messages": [user(result())]}, "^messages.*'t1'"),
        ({"system": [IMAGE]}, "^system"),
        ({"max_tokens": None}, "^max_tokens"),
        ({"max_tokens": 0}, "^max_tokens"),
        ({"temperature": 1.5}, "^temperature"),
        ({"stop_sequences": "x"}, "^stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_2025"),
        ({"tools": [{"name": "go"}]}, "^tools.*input_schema"),
        ({"tool_choice": {"type": "auto"}}, "^tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "^tool_choice.*name"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "^tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "^thinking.*not reason"),
        ({"thinking": {"type": "sometimes"}}, "^thinking"),
        ({"output_config": {"format": {"type": "json_object"}}}, "^output_config"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ApiError, RequestError), match=message) as caught:
        chat(**fields)
    error: Any = caught.value
    assert isinstance(error, RequestError) or error.status == 400


@pytest.mark.parametrize("name", sorted(MESSAGES_REFUSED))
def test_a_refused_field_says_why(name: str) -> None:
    with pytest.raises(ApiError, match="^" + name) as caught:
        chat(**{name: "anything"})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    for neutral in (None, *MESSAGES_REFUSED[name].neutral):
        assert chat(**{name: neutral}) == chat()


QWEN, SEED = {"enable_thinking"}, {"thinking", "thinking_budget"}
ON = Thinking.parse({"type": "enabled", "budget_tokens": 2000})
OFF = Thinking.parse({"type": "disabled"})


@pytest.mark.parametrize(
    ("thinking", "known", "reasons", "want"),
    [
        (None, QWEN, True, {"enable_thinking": False}),
        (OFF, QWEN, True, {"enable_thinking": False}),
        (ON, QWEN, True, {"enable_thinking": True}),
        (ON, SEED, True, {"thinking": True, "thinking_budget": 2000}),
        (Thinking.parse({"type": "enabled"}), SEED, True, {"thinking": True}),
        (Thinking.parse({"type": "adaptive"}), QWEN, True, {}),
        (None, set(), True, {}),
        (ON, set(), True, {}),
        (OFF, set(), True, None),
        (ON, QWEN, False, None),
        (OFF, set(), False, {}),
        (None, set(), False, {}),
    ],
)
def test_thinking_is_the_templates_business(
    thinking: Thinking | None, known: set[str], reasons: bool, want: dict[str, Any] | None
) -> None:
    if want is not None:
        assert thinking_variables(thinking, known, reasons=reasons) == want
        return
    with pytest.raises(ApiError, match=r"^thinking") as caught:
        thinking_variables(thinking, known, reasons=reasons)
    assert caught.value.param == "thinking"


def test_capabilities_tell_of_every_field() -> None:
    table = messages_fields(SamplingParams(temperature=0.0), tools=True)
    assert MessagesRequest.model_fields.keys() <= table.keys()
    assert table["container"]["status"] == "refused"
    assert (table["temperature"]["minimum"], table["temperature"]["maximum"]) == (0, 1)
    assert {table[name]["status"] for name in MESSAGES_NO_EFFECT} == {"no_effect"}
    assert messages_fields(SamplingParams(), tools=False)["tools"]["status"] == "refused"
    counted = count_fields(tools=True)
    assert CountTokensRequest.model_fields.keys() <= counted.keys()
    assert "max_tokens" not in counted
