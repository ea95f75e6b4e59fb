"""Answers of /v1/messages: what a stream tells adds up to the whole, block by block."""

import json
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from trtllm_lite.runtime.request_maker import Source
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.conversation import Conversation
from trtllm_lite.runtime.server.convert import Ask
from trtllm_lite.runtime.server.errors import ApiError
from trtllm_lite.runtime.server.messages_api.reply import MessagesReply
from trtllm_lite.runtime.server.messages_api.translate import chat_request
from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.protocol.messages import MessagesRequest
from trtllm_lite.runtime.server.service import ModelCard, Served
from trtllm_lite.runtime.server.tool_calls import Reading, tool_use

CARD = ModelCard(("m",), 0, "fp", tool_format=TOOL_FORMATS["hermes"], reasoning=True)
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("go", "stay")]
CALL = '<tool_call>\n{"name": "go", "arguments": {"x": [1, "é"]}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "go", "arguments": {"x": '
HUGE = f'<tool_call>\n{{"name": "go", "arguments": {{"x": {10**30}}}}}\n</tool_call>'
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}


class Letters:
    """A tokenizer with a token for each character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def reply(**fields: Any) -> MessagesReply:
    body = MessagesRequest.parse({**ASK, "tools": TOOLS, **fields})
    chat = chat_request(body, frozenset(), reasons=True)
    llm: Any = SimpleNamespace(tokenizer=Letters())
    ask = Ask(Source(messages=chat.messages), SamplingParams())
    talk = Conversation(Served("m", llm, CARD), ask, Reading(tool_use(chat, CARD), reasoning=True))
    return MessagesReply(talk, body.max_tokens)


def output(text: str, delta: str, reason: Any, **fields: Any) -> RequestOutput:
    choice = CompletionOutput(0, text, tuple(map(ord, text)), reason, delta=delta, **fields)
    done = reason is not None
    return RequestOutput("r", "prompt", (1, 2, 3), [choice], done, RequestMetrics(0.0), 2)


def whole(text: str, reason: str = "stop", **fields: Any) -> Any:
    return reply(**fields).whole([output(text, text, reason)])


def streamed(made: MessagesReply, text: str, size: int, reason: str = "stop") -> list[Any]:
    parts: list[Any] = []
    for start in range(0, len(text), size):
        end = start + size
        parts += made.chunks(0, output(text[:end], text[start:end], None))
    parts += made.chunks(0, output(text, "", reason))
    return [*made.opening(), *parts, *made.closing()]


def rebuilt(events: list[Any]) -> Any:
    """The message as a client puts it together."""
    message: Any = None
    texts: list[str] = []
    for event in deepcopy(events):
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts.append("")
        elif kind == "content_block_delta":
            assert event["index"] == len(texts) - 1
            texts[-1] += deltas(event["delta"])
        elif kind == "content_block_stop":
            finish(message["content"][event["index"]], texts[-1])
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
        else:
            assert kind in ("ping", "message_stop")
    return message


def deltas(delta: Any) -> str:
    (text,) = [value for name, value in delta.items() if name != "type"]
    return str(text)


def finish(block: Any, text: str) -> None:
    if block["type"] != "tool_use":
        block[block["type"]] += text
        return
    try:
        block["input"] = json.loads(text)
    except ValueError:
        assert block["input"] == {}


def without_ids(message: Any) -> Any:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


TEXTS = [
    "plain",
    "",
    CALL,
    f"first {CALL}",
    f"{CALL}\n{CALL}",
    f"<think>hm, {CALL}</think>so: {CALL} and on",
    "<think>without end",
    "<tool_call>",
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_adds_up_to_the_whole(text: str, size: int, reason: str) -> None:
    events = streamed(reply(), text, size, reason)
    assert [e["type"] for e in events[:2]] == ["message_start", "ping"]
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    assert without_ids(rebuilt(events)) == without_ids(whole(text, reason))


def test_blocks_are_what_the_text_means() -> None:
    made = whole(f"<think>hm</think>so: {CALL}")
    thought, text, call = made["content"]
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", "m")
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert (text["type"], text["text"]) == ("text", "so: ")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "go", {"x": [1, "é"]})
    assert made["id"].startswith("msg_")
    assert call["id"].startswith("toolu_")


@pytest.mark.parametrize(
    ("text", "reason", "ended_by", "stop"),
    [
        ("a", "stop", None, ("end_turn", None)),
        ("a", "stop", 7, ("end_turn", None)),
        ("a", "stop", "END", ("stop_sequence", "END")),
        ("a" * 50, "length", None, ("max_tokens", None)),
        ("a" * 49, "length", None, ("model_context_window_exceeded", None)),
        (CALL, "stop", None, ("tool_use", None)),
        (CALL, "length", None, ("max_tokens", None)),
    ],
)
def test_why_it_ended(text: str, reason: str, ended_by: Any, stop: Any) -> None:
    made = reply().whole([output(text, text, reason, stop_reason=ended_by)])
    assert (made["stop_reason"], made["stop_sequence"]) == stop


def test_a_call_that_is_cut_has_no_input() -> None:
    made = whole(CUT, "length", tool_choice={"type": "any"})
    (call,) = made["content"]
    assert (call["type"], call["input"]) == ("tool_use", {})


def test_numbers_of_any_size_are_an_input() -> None:
    (call,) = whole(HUGE)["content"]
    assert float(call["input"]["x"]) == 1e30


def test_the_cached_part_of_a_prompt_is_counted_apart() -> None:
    counts = {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 1,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert whole("a")["usage"] == counts
    begun, *_, ended, _ = streamed(reply(), "a", 1)
    assert ended["usage"] == counts
    del counts["output_tokens_details"]
    assert begun["message"]["usage"] == {**counts, "output_tokens": 0}


def test_tokens_of_reasoning_are_counted() -> None:
    made = whole("<think>hm</think>so")
    thought = len("<think>hm</think>")
    assert made["usage"]["output_tokens_details"] == {"thinking_tokens": thought}


def test_a_stream_may_begin_before_its_prompt_is_counted() -> None:
    begun, _ = reply().opening()
    assert set(begun["message"]["usage"].values()) == {0}


def test_without_parallel_calls_the_first_counts() -> None:
    text = f"{CALL}\n{CALL.replace('go', 'stay')}"
    assert [block["name"] for block in whole(text)["content"]] == ["go", "stay"]
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert [block["name"] for block in whole(text, tool_choice=one)["content"]] == ["go"]


def test_a_failure_is_an_event_in_the_shape_of_errors() -> None:
    (event,) = reply().failure(ApiError(503, "stopped", kind="unavailable_error"))
    assert event["type"] == "error"
    assert event["error"] == {"type": "overloaded_error", "message": "stopped"}
