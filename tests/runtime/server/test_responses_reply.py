"""Answers of /v1/responses: what a stream tells adds up to the whole, item by item."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from trtllm_lite.runtime.request_maker import Source
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.conversation import Conversation
from trtllm_lite.runtime.server.convert import Ask
from trtllm_lite.runtime.server.errors import ApiError
from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.protocol.responses import LOGPROBS, ResponsesRequest
from trtllm_lite.runtime.server.responses_api.reply import ResponsesReply
from trtllm_lite.runtime.server.responses_api.translate import chat_request
from trtllm_lite.runtime.server.service import ModelCard, Served
from trtllm_lite.runtime.server.tool_calls import Reading, tool_use

CARD = ModelCard(("m",), 0, "fp", tool_format=TOOL_FORMATS["hermes"], reasoning=True)
TOOLS = [{"type": "function", "name": name} for name in ("go", "stay")]
CALL = '<tool_call>\n{"name": "go", "arguments": {"x": 1}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "go", "arguments": {"x": '


class Letters:
    """A tokenizer with a token for each character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def reply(card: ModelCard = CARD, **fields: Any) -> ResponsesReply:
    body = ResponsesRequest.parse({"input": "hi", **fields})
    chat = chat_request(body)
    llm: Any = SimpleNamespace(tokenizer=Letters())
    ask = Ask(Source(messages=chat.messages), SamplingParams(temperature=0.5, top_p=0.9))
    reading = Reading(tool_use(chat, card), card.reasoning)
    return ResponsesReply(body, Conversation(Served("m", llm, card), ask, reading))


def output(text: str, delta: str, reason: Any, **fields: Any) -> RequestOutput:
    ids = tuple(map(ord, text))
    choice = CompletionOutput(0, text, ids, reason, delta=delta, **fields)
    done = reason is not None
    return RequestOutput("r", "prompt", (1, 2), [choice], done, RequestMetrics(0.0), 1)


def streamed(made: ResponsesReply, text: str, size: int, reason: str = "stop") -> list[Any]:
    parts: list[Any] = []
    for start in range(0, len(text), size):
        end = start + size
        parts += made.chunks(0, output(text[:end], text[start:end], None))
    parts += made.chunks(0, output(text, "", reason))
    return [*made.opening(), *parts, *made.closing()]


def rebuilt(events: list[Any]) -> list[Any]:
    """The output as a client puts it together, held against what each item ends as."""
    items: list[Any] = []
    for event in deepcopy(events):
        kind, index = event["type"].removeprefix("response."), event.get("output_index", 0)
        if kind == "output_item.added":
            assert index == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[index]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[index]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            assert items[index]["status"] == "in_progress"
            items[index]["status"] = event["item"]["status"]
            assert items[index] == event["item"]
        elif "item_id" in event:
            assert kind.endswith(".done")
            assert event["item_id"] == items[index]["id"]
    return items


def without_ids(items: list[Any]) -> list[Any]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


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
    whole = reply(tools=TOOLS).whole([output(text, text, reason)])
    events = streamed(reply(tools=TOOLS), text, size, reason)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert rebuilt(events) == last["response"]["output"]
    assert without_ids(last["response"]["output"]) == without_ids(whole["output"])
    same = ("status", "usage", "incomplete_details", "tools", "error")
    assert {k: last["response"][k] for k in same} == {k: whole[k] for k in same}


def test_items_are_what_the_text_means() -> None:
    text = f"<think>hm</think>so: {CALL}"
    made = reply(tools=TOOLS).whole([output(text, text, "stop")])
    thought, message, call = made["output"]
    assert (made["status"], made["error"]) == ("completed", None)
    assert thought["type"] == "reasoning"
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert thought["summary"] == []
    part = {"type": "output_text", "text": "so: ", "annotations": [], "logprobs": []}
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"] == [part]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "go", '{"x": 1}')
    starts = [item["id"].split("_")[0] for item in made["output"]]
    assert starts == ["rs", "msg", "fc"]
    assert call["call_id"].startswith("call_")
    assert {item["status"] for item in made["output"]} == {"completed"}


def test_tokens_are_counted_with_those_of_reasoning() -> None:
    text = "<think>hm</think>so"
    made = reply().whole([output(text, text, "stop")])
    assert made["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": len(text),
        "output_tokens_details": {"reasoning_tokens": len("<think>hm</think>")},
        "total_tokens": 2 + len(text),
    }


def test_an_answer_that_is_cut_is_incomplete() -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 9}
    for text, kind in ((CUT, "function_call"), ("<think>hm", "reasoning")):
        made = reply(**fields).whole([output(text, text, "length")])
        (item,) = made["output"]
        assert (item["type"], item["status"]) == (kind, "incomplete")
        assert made["status"] == "incomplete"
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}


def test_without_parallel_calls_the_first_counts() -> None:
    text = f"{CALL}\n{CALL.replace('go', 'stay')}"
    assert len(reply(tools=TOOLS).whole([output(text, text, "stop")])["output"]) == 2
    one = reply(tools=TOOLS, parallel_tool_calls=False)
    (call,) = one.whole([output(text, text, "stop")])["output"]
    assert call["name"] == "go"


def test_a_response_repeats_its_request() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    made = reply(
        metadata={"a": "b"},
        instructions="be brief",
        text={"format": form},
        tools=TOOLS,
        tool_choice={"type": "function", "name": "go"},
        parallel_tool_calls=False,
        user="me",
    ).whole([output("x", "x", "stop")])
    assert made["metadata"] == {"a": "b"}
    assert made["text"] == {"format": form}
    assert made["tool_choice"] == {"type": "function", "name": "go"}
    tool = {"type": "function", "description": None, "parameters": None, "strict": None}
    assert made["tools"] == [{**tool, "name": name} for name in ("go", "stay")]
    assert (made["temperature"], made["top_p"]) == (0.5, 0.9)
    assert (made["instructions"], made["user"]) == ("be brief", "me")
    assert (made["store"], made["parallel_tool_calls"]) == (False, False)
    plain = reply().whole([output("x", "x", "stop")])
    assert (plain["text"], plain["tool_choice"]) == ({"format": {"type": "text"}}, "auto")


def entry(text: str) -> dict[int, Logprob]:
    return {ord(text): Logprob(-0.5, 1, text), 0: Logprob(-1.0, 2, "?")}


def test_scores_come_with_their_text_once() -> None:
    card = ModelCard(("m",), 0, "fp")
    fields = {"include": [LOGPROBS], "top_logprobs": 1}
    text = "abc"
    scores = [entry(c) for c in text]
    whole = reply(card, **fields).whole([output(text, text, "length", logprobs=scores)])
    want = whole["output"][0]["content"][0]["logprobs"]
    assert [s["token"] for s in want] == ["a", "b", "c"]
    assert [len(s["top_logprobs"]) for s in want] == [1, 1, 1]
    made = reply(card, **fields)
    # The text of the second token is held back until the third, that of the third for ever.
    parts = made.chunks(0, output("a", "a", None, logprobs=scores[:1]))
    parts += made.chunks(0, output("a", "", None, logprobs=scores[:2]))
    parts += made.chunks(0, output("ab", "b", None, logprobs=scores[:2]))
    parts += made.chunks(0, output("ab", "", "length", logprobs=scores))
    told = [s for e in parts if e["type"].endswith("text.delta") for s in e["logprobs"]]
    assert told == want
    (done,) = [e for e in parts if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == want


def test_a_failure_ends_a_stream_with_both_of_its_events() -> None:
    made = reply()
    begun = made.chunks(0, output("a", "a", None))
    error, failed = made.failure(ApiError(500, "no memory", kind="server_error", code="oops"))
    assert (error["type"], error["message"], error["code"]) == ("error", "no memory", "oops")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "no memory"}
    assert error["sequence_number"] == begun[-1]["sequence_number"] + 1
