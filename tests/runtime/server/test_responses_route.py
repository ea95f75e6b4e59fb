"""POST /v1/responses: the engine's own answer, in the form of OpenAI's newer API."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.protocol.responses import LOGPROBS
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import ServerConfig

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

PATH = "/v1/responses"
FLAG = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
HERMES = ModelCard(("fake",), 0, "fp", tool_format=TOOL_FORMATS["hermes"])
TOOLS = [{"type": "function", "name": name, "parameters": FLAG} for name in ("go", "stay")]


async def ask(lab: Lab, given: Any = "hello", **fields: Any) -> Any:
    answer = await lab.post(PATH, {"input": given, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


def text_of(response: Any) -> str:
    parts = [part for item in response["output"] for part in item.get("content", [])]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


def test_an_answer_is_that_of_chat(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        fields = {"temperature": 1.0, "seed": 3}
        want = (await lab.chat("hello", max_tokens=9, **fields)).json()
        made = await ask(lab, max_output_tokens=9, **fields)
        assert text_of(made) == want["choices"][0]["message"]["content"]
        assert made["id"].startswith("resp_")
        assert len(made["id"]) == len("resp_") + 32
        assert (made["object"], made["model"]) == ("response", "fake")
        assert made["usage"]["input_tokens"] == want["usage"]["prompt_tokens"]
        assert made["usage"]["output_tokens"] == want["usage"]["completion_tokens"]
        ended = want["choices"][0]["finish_reason"] == "stop"
        assert made["status"] == ("completed" if ended else "incomplete")

    run_lab(test)


def test_all_of_the_input_is_the_prompt(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        turns = [
            {"role": "user", "content": [{"type": "input_text", "text": "ab"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "cd"}]},
            {"role": "user", "content": "ef"},
        ]
        made = await ask(lab, turns, instructions="xy ", max_output_tokens=5)
        same = await ask(lab, "xy abcdef", max_output_tokens=5)
        assert made["usage"]["input_tokens"] == len("xy abcdef")
        assert text_of(made) == text_of(same)

    run_lab(test)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_output_tokens": 12},
        {"max_output_tokens": 20, "stop": ["a", "é"], "seed": 1, "temperature": 1.5},
        {"max_output_tokens": 12, "include": [LOGPROBS], "top_logprobs": 2, "ignore_eos": True},
        {},
    ],
)
def test_a_stream_adds_up_to_the_answer(run_lab: RunLab, fields: dict[str, Any]) -> None:
    async def test(lab: Lab) -> None:
        whole = await ask(lab, "a long question", **fields)
        answer = await lab.post(PATH, {"input": "a long question", "stream": True, **fields})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = answer.named_events()
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        assert "".join(e["delta"] for e in deltas) == text_of(whole)
        last = events[-1]["response"]
        assert text_of(last) == text_of(whole)
        assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
        assert (last["status"], last["id"]) == (whole["status"], events[0]["response"]["id"])
        scores = [s for e in deltas for s in e["logprobs"]]
        (item,) = whole["output"]
        assert scores == item["content"][0]["logprobs"]
        if "include" in fields:
            assert "".join(s["token"] for s in scores) == text_of(whole)

    run_lab(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is(run_lab: RunLab, stream: bool) -> None:
    async def test(lab: Lab) -> None:
        choice = {"type": "function", "name": "stay"}
        body = {"input": "hello", "tools": TOOLS, "tool_choice": choice, "stream": stream}
        answer = await lab.post(PATH, {**body, "temperature": 1.0, "seed": 2})
        made = answer.named_events()[-1]["response"] if stream else answer.json()
        (call,) = made["output"]
        assert (call["type"], call["name"]) == ("function_call", "stay")
        assert isinstance(json.loads(call["arguments"])["x"], bool)

    run_lab(test, room=256, card=HERMES)


def test_text_keeps_to_its_form(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        form = {"type": "json_schema", "name": "n", "schema": FLAG}
        made = await ask(lab, text={"format": form}, temperature=1.0, seed=1)
        assert isinstance(json.loads(text_of(made))["x"], bool) or made["status"] == "incomplete"

    run_lab(test, room=256)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"input": "x" * 70}, "input"),
    ({"max_output_tokens": 70}, "max_output_tokens"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": 123}}}}, "text"),
    ({"tools": TOOLS}, "tools"),
    ({"stream_options": {}}, "stream_options"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"temperature": 3}, "temperature"),
]


def test_a_refusal_names_the_field(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for fields, param in REFUSALS:
            answer = await lab.post(PATH, {"input": "hello", **fields})
            assert (answer.status, answer.error["param"]) == (400, param)
            assert answer.error["message"].startswith(param)
        assert (await ask(lab, max_output_tokens=1))["status"] == "incomplete"

    run_lab(test)


def test_scores_are_those_of_plain_text_only(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for fields in ({"tools": TOOLS}, {}):
            answer = await lab.post(PATH, {"input": "hello", "include": [LOGPROBS], **fields})
            assert (answer.status, answer.error["param"]) == (400, "include")

    run_lab(test, card=replace(HERMES, reasoning=True))


def test_there_are_no_earlier_responses(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for method in ("GET", "DELETE", "POST"):
            for path in ("resp_1", "resp_1/cancel", "resp_1/input_items"):
                answer = await lab.start(method, f"{PATH}/{path}").whole()
                assert (answer.status, answer.error["code"]) == (404, "response_not_found")
                assert "not stored" in answer.error["message"]

    run_lab(test)


TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{{ m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.x }}{% endfor %}"
    "{% endfor %}{% if tools %}tools{% endif %}"
)


def test_output_comes_back_as_input(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        first = await ask(lab, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        (call,) = first["output"]
        flag = json.loads(call["arguments"])["x"]
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
        turns = [{"role": "user", "content": "hello"}, thought, call, result]
        made = await ask(lab, turns, tools=TOOLS, max_output_tokens=3)
        prompt = f"user helloassistant hmgo{flag}tool 7tools"
        assert made["usage"]["input_tokens"] == len(prompt)

    run_lab(test, room=256, card=HERMES, template=TEMPLATE)


def test_a_fault_later_is_told_in_the_stream(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        body = {"input": "hello", "stream": True, "ignore_eos": True}
        live = lab.start("POST", PATH, body)
        lab.session.permits.release(2)
        await live.until(lambda answer: b"output_text.delta" in answer.body)
        lab.session.fail_next(1)
        lab.session.permits.release(1000)
        events = (await live.whole()).named_events()
        assert [e["type"] for e in events[-2:]] == ["error", "response.failed"]
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        assert events[-1]["response"]["error"]["code"] == "server_error"

    run_lab(test, is_open=False)


def test_a_silent_stream_begins_before_its_text(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", PATH, {"input": "hello", "stream": True})
        await live.until(lambda answer: b": keep-alive\n\n" in answer.body)
        lab.session.permits.release(1000)
        events = (await live.whole()).named_events()
        assert events[0]["type"] == "response.created"
        assert [e["sequence_number"] for e in events] == list(range(len(events)))

    run_lab(test, ServerConfig(keep_alive_seconds=0.01), is_open=False)


def test_many_at_once_get_their_own_answers(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        inputs = ["a", "bc", "def", "ghij"]
        alone = [text_of(await ask(lab, given, max_output_tokens=8)) for given in inputs]
        crowd = await asyncio.gather(*(ask(lab, given, max_output_tokens=8) for given in inputs))
        assert [text_of(each) for each in crowd] == alone
        assert len({each["id"] for each in crowd}) == 4

    run_lab(test)
