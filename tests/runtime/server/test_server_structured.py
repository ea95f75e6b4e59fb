"""Answers kept to a form, and answers that call tools: through the server and in its replies."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from trtllm_lite.runtime.server.chat_reply import ChatReply
from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.protocol.chat import ChatRequest
from trtllm_lite.runtime.server.service import ModelCard, Served
from trtllm_lite.runtime.server.tool_calls import Reading, tool_use

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

FLAG = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
HERMES = ModelCard(("fake",), 0, "fp", tool_format=TOOL_FORMATS["hermes"])
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": FLAG}} for name in ("go", "stay")
]
CALL = '<tool_call>\n{"name": "go", "arguments": {"x": true}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_regex": "[ab]{3}"}, lambda text: re.fullmatch("[ab]{3}", text)),
        ({"response_format": {"type": "json_object"}}, lambda text: text.startswith("{")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": FLAG},
                }
            },
            lambda text: isinstance(json.loads(text)["x"], bool),
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_text_keeps_to_its_form(
    run_lab: RunLab, fields: dict[str, Any], fits: Callable[[str], object], stream: bool
) -> None:
    async def test(lab: Lab) -> None:
        for seed in range(3):
            options = {"temperature": 1.0, "seed": seed, "stream": stream}
            answer = await lab.chat("hello", **fields, **options)
            assert answer.status == 200, answer.body
            if stream:
                parts = [c for e in answer.events()[:-1] for c in e["choices"]]
                text = "".join(c["delta"].get("content", "") for c in parts)
                reason = parts[-1]["finish_reason"]
            else:
                (choice,) = answer.json()["choices"]
                text, reason = choice["message"]["content"], choice["finish_reason"]
            assert fits(text) or reason == "length"

    run_lab(test, room=256)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "("},
        {"guided_json": {"type": 123}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no"}}}},
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_by_name(
    run_lab: RunLab, fields: dict[str, Any]
) -> None:
    async def test(lab: Lab) -> None:
        for stream in (False, True):
            answer = await lab.chat("hello", **fields, stream=stream)
            assert (answer.status, answer.error["param"]) == (400, next(iter(fields)))
        assert (await lab.chat("hello", max_tokens=2)).status == 200

    run_lab(test)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"go", "stay"}),
        ({"type": "function", "function": {"name": "stay"}}, {"stay"}),
    ],
)
def test_a_tool_that_must_be_called_is(run_lab: RunLab, choice: Any, names: set[str]) -> None:
    async def test(lab: Lab) -> None:
        fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        for seed in range(3):
            answer = await lab.chat("hello", **fields, temperature=1.0, seed=seed)
            assert answer.status == 200, answer.body
            (made,) = answer.json()["choices"]
            (call,) = made["message"]["tool_calls"]
            assert made["finish_reason"] == "tool_calls"
            assert made["message"]["content"] is None
            assert call["type"] == "function"
            assert call["id"].startswith("call_")
            assert call["function"]["name"] in names
            assert isinstance(json.loads(call["function"]["arguments"])["x"], bool)

    run_lab(test, room=256, card=HERMES)


def test_tools_and_a_form_exclude_each_other(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.chat(tools=TOOLS, response_format={"type": "json_object"})
        assert (answer.status, answer.error["param"]) == (400, "response_format")

    run_lab(test, card=HERMES)


class Replies:
    """A reply to a request with these fields, fed with text that the test writes."""

    def __init__(self, card: ModelCard = HERMES, **fields: Any) -> None:
        raw = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
        body = ChatRequest.parse(raw)
        reading = Reading(tool_use(body, card), card.reasoning)
        tokenizer = SimpleNamespace(encode=lambda text, **_: [0, 0], decode=lambda ids, **_: "")
        llm: Any = SimpleNamespace(tokenizer=tokenizer)
        self.reply = ChatReply(body, Served("fake", llm, card), 1, reading)

    def whole(self, text: str) -> Any:
        (choice,) = self.reply.whole([output(text, text, "stop")])["choices"]
        return choice

    def streamed(self, text: str, size: int) -> tuple[dict[str, Any], str | None]:
        """The message that the deltas add up to, and the reason at the end."""
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        chunks = list(self.reply.opening())
        for start in range(0, len(text), size):
            delta = text[start : start + size]
            chunks += self.reply.chunks(0, output(text[: start + size], delta, None))
        chunks += self.reply.chunks(0, output(text, "", "stop"))
        for chunk in chunks:
            add(message, chunk["choices"][0]["delta"])
        return message, chunks[-1]["choices"][0]["finish_reason"]


def output(text: str, delta: str, reason: Any) -> RequestOutput:
    choice = CompletionOutput(0, text, (1,), reason, delta=delta)
    return RequestOutput("r", "prompt", (1,), [choice], reason is not None, RequestMetrics(0.0))


def add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        message[name] += delta.get(name, "")
    for call in delta.get("tool_calls", []):
        if "id" in call:
            assert call["index"] == len(message["tool_calls"])
            message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
        message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", ["plain", CALL, f"first {CALL}", f"{CALL}\n{CALL}", "<tool_call>"])
def test_a_streamed_message_is_the_whole_one(text: str, size: int) -> None:
    whole = Replies().whole(text)
    message, reason = Replies().streamed(text, size)
    assert message["content"] == (whole["message"]["content"] or "")
    calls = whole["message"].get("tool_calls", [])
    assert message["tool_calls"] == [call["function"] for call in calls]
    assert len(calls) == text.count("arguments")
    assert reason == whole["finish_reason"] == ("tool_calls" if calls else "stop")


def test_without_parallel_calls_the_first_counts() -> None:
    text = f"{CALL}\n{CALL.replace('go', 'stay')}"
    assert len(Replies().whole(text)["message"]["tool_calls"]) == 2
    (call,) = Replies(parallel_tool_calls=False).whole(text)["message"]["tool_calls"]
    assert call["function"]["name"] == "go"


@pytest.mark.parametrize("size", [1, 1000])
def test_reasoning_is_told_apart(size: int) -> None:
    card = replace(HERMES, reasoning=True)
    text = f"<think>hm, {CALL}</think>so: {CALL}"
    whole = Replies(card).whole(text)["message"]
    assert whole["reasoning_content"] == f"hm, {CALL}"
    assert whole["content"].strip() == "so:"
    assert len(whole["tool_calls"]) == 1
    message, _ = Replies(card).streamed(text, size)
    assert message["reasoning_content"] == whole["reasoning_content"]
    assert message["content"] == whole["content"]


def test_tokens_of_reasoning_are_counted(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        fields = {"max_tokens": 9, "ignore_eos": True}
        counts = (await lab.chat("hi", **fields)).json()["usage"]
        assert counts["completion_tokens_details"] == {"reasoning_tokens": 9}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last, _ = (await lab.chat("hi", **fields, **options)).events()
        assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}

    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    run_lab(test, card=replace(HERMES, reasoning=True), template=template)
