"""Tool calls: forced ones, their streams, and choices that fit no tool."""

import json
from typing import Any

import pytest

from trtllm_lite.tools.conformance.frontend.client import CHAT, Frontend

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "maxLength": 20},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    """A function with the properties of a weather report, and `more`."""
    properties = {**PROPERTIES, **more}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool("get_current_weather")
FORECAST = tool("get_forecast", num_days={"type": "integer", "minimum": 1, "maximum": 14})
TOOLS = [WEATHER, FORECAST]
NAMED = {"type": "function", "function": {"name": "get_forecast"}}
QUESTION = [{"role": "user", "content": "What is the weather in Dallas, in fahrenheit?"}]
ASKED: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 160}


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_forced_call_has_the_tools_form(frontend: Frontend, choice: Any) -> None:
    answer = frontend.good(CHAT, tools=TOOLS, tool_choice=choice, **ASKED)["choices"][0]
    (call,) = answer["message"]["tool_calls"][:1]
    assert (call["type"], len(call["id"]) >= 9) == ("function", True)
    names = ["get_forecast"] if choice is NAMED else ["get_current_weather", "get_forecast"]
    assert call["function"]["name"] in names
    arguments = json.loads(call["function"]["arguments"])
    assert isinstance(arguments["city"], str)
    assert arguments["unit"] in ("celsius", "fahrenheit")


def test_a_streamed_call_is_the_whole_one(frontend: Frontend) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": NAMED}
    whole = frontend.good(CHAT, **asked)["choices"][0]["message"]["tool_calls"][0]
    name, arguments, ids = None, "", []
    for chunk in frontend.chunks(CHAT, **asked):
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            assert call["index"] == 0
            ids += [call["id"]] if "id" in call else []
            if call["function"].get("name"):
                assert name is None, "a name is sent whole, once"
                name = call["function"]["name"]
            arguments += call["function"].get("arguments", "")
    assert len(ids) == 1
    assert name == whole["function"]["name"]
    assert json.loads(arguments) == json.loads(whole["function"]["arguments"])


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_forced_call_does_not_finish_with_tool_calls(frontend: Frontend, choice: Any) -> None:
    answer = frontend.good(CHAT, tools=TOOLS, tool_choice=choice, **ASKED)["choices"][0]
    assert answer["finish_reason"] != "tool_calls"


def test_a_tools_result_may_come_back(frontend: Frontend) -> None:
    function = {"name": "get_current_weather", "arguments": '{"city": "Dallas"}'}
    messages = [
        *QUESTION,
        {
            "role": "assistant",
            "tool_calls": [{"id": "call-12345", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call-12345", "content": "98"},
    ]
    answer = frontend.good(
        CHAT, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=32, temperature=0
    )
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"] is not None
    assert not message.get("tool_calls")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": NAMED},
        {"tool_choice": NAMED, "tools": [WEATHER]},
        {"tool_choice": "required", "tools": []},
    ],
    ids=["no tools", "another tool", "empty"],
)
def test_a_choice_without_its_tool_is_refused(frontend: Frontend, fields: dict[str, Any]) -> None:
    assert frontend.post(CHAT, **ASKED, **fields).status_code == 400
