"""POST /v1/messages and /v1/messages/count_tokens: the engine's own answer, in Anthropic's form."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import Limits, ServerConfig, key_digest

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
FLAG = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
HERMES = ModelCard(("fake",), 0, "fp", tool_format=TOOL_FORMATS["hermes"])
TOOLS = [{"name": name, "input_schema": FLAG} for name in ("go", "stay")]
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}


async def ask(lab: Lab, **fields: Any) -> Any:
    answer = await lab.post(PATH, {**ASK, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


def text_of(message: Any) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def prompt_tokens(counts: Any) -> int:
    """Taken from the prefix cache, or not."""
    return int(counts["input_tokens"] + counts["cache_read_input_tokens"])


def test_an_answer_is_that_of_chat(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        fields = {"temperature": 1.0, "seed": 3}
        want = (await lab.chat("hello", max_tokens=9, **fields)).json()
        made = await ask(lab, **fields)
        assert text_of(made) == want["choices"][0]["message"]["content"]
        assert (made["type"], made["model"]) == ("message", "fake")
        assert prompt_tokens(made["usage"]) == want["usage"]["prompt_tokens"]
        assert made["usage"]["output_tokens"] == want["usage"]["completion_tokens"]

    run_lab(test)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop_sequences": ["a", "é"], "seed": 1, "temperature": 1.0, "max_tokens": 20},
        {"system": "be brief", "ignore_eos": True},
    ],
)
def test_a_stream_adds_up_to_the_answer(run_lab: RunLab, fields: dict[str, Any]) -> None:
    async def test(lab: Lab) -> None:
        whole = await ask(lab, **fields)
        answer = await lab.post(PATH, {**ASK, **fields, "stream": True})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = answer.named_events()
        deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
        assert "".join(deltas) == text_of(whole)
        (begun, *_, ended, last) = events
        assert (begun["type"], last) == ("message_start", {"type": "message_stop"})
        assert prompt_tokens(begun["message"]["usage"]) == prompt_tokens(whole["usage"])
        assert ended["delta"]["stop_reason"] == whole["stop_reason"]
        assert ended["delta"]["stop_sequence"] == whole["stop_sequence"]
        assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]

    run_lab(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is(run_lab: RunLab, stream: bool) -> None:
    async def test(lab: Lab) -> None:
        body = {**ASK, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "stay"}}
        body |= {"max_tokens": 150, "temperature": 1.0, "seed": 2}
        made = await ask(lab, **body)
        (call,) = made["content"]
        assert (call["type"], call["name"], made["stop_reason"]) == ("tool_use", "stay", "tool_use")
        assert isinstance(call["input"]["x"], bool)

    run_lab(test, room=256, card=HERMES)


TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.x }}{% endfor %}"
    "{% endfor %}{% if enable_thinking is false %}off{% elif enable_thinking %}on{% endif %}"
    "{% if tools %}tools{% endif %}"
)


def test_calls_and_their_results_come_back_in_the_prompt(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        body = {**ASK, "tools": TOOLS, "max_tokens": 150}
        made = await ask(lab, **body, tool_choice={"type": "tool", "name": "go"})
        (call,) = made["content"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "7"}
        turns = [
            *ASK["messages"],
            {"role": "assistant", "content": made["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "so"}]},
        ]
        count = await lab.post(COUNT, {"messages": turns, "tools": TOOLS})
        prompt = f"user helloassistant go{call['input']['x']}tool 7user sotools"
        assert count.json() == {"input_tokens": len(prompt) + len("off")}
        run = await ask(lab, **{**body, "messages": turns, "max_tokens": 5})
        assert prompt_tokens(run["usage"]) == count.json()["input_tokens"]

    run_lab(test, room=256, card=HERMES, template=TEMPLATE)


def test_an_answer_goes_on_with_what_was_begun(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        start = {"role": "assistant", "content": [{"type": "text", "text": "well, "}]}
        body = {**ASK, "messages": [*ASK["messages"], start]}
        prompt = "user helloassistant well, "
        want = (await lab.complete(prompt, max_tokens=9)).json()["choices"][0]["text"]
        made = await ask(lab, **body)
        assert text_of(made) == want
        assert prompt_tokens(made["usage"]) == len(prompt)
        assert (await lab.post(COUNT, body)).json() == {"input_tokens": len(prompt)}
        call = {"type": "tool_use", "id": "1", "name": "go", "input": {}}
        for path in (PATH, COUNT):
            turns = [*ASK["messages"], {"role": "assistant", "content": [call]}]
            answer = await lab.post(path, {**body, "messages": turns})
            assert answer.status == 400
            told = (
                "messages: the last message ends with tool_calls; allowed: one that ends with its"
            )
            assert answer.json()["error"]["message"].startswith(told)

    run_lab(test, card=HERMES, template=TEMPLATE)


def test_thinking_is_a_switch_of_the_template(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for kind, shown in (
            ("disabled", "off"),
            ("enabled", "on"),
            ("adaptive", ""),
            (None, "off"),
        ):
            thinking = None if kind is None else {"type": kind, "budget_tokens": 5}
            made = await ask(lab, thinking=thinking)
            assert prompt_tokens(made["usage"]) == len(f"user hello{shown}"), kind

    run_lab(test, card=replace(HERMES, reasoning=True), template=TEMPLATE)


def test_more_than_the_context_holds_is_cut_by_it(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        made = await ask(lab, max_tokens=1000, ignore_eos=True)
        assert made["stop_reason"] == "model_context_window_exceeded"
        assert made["usage"]["output_tokens"] == 64 - len("hello")
        answer = await lab.post(PATH, {**ASK, "messages": [{"role": "user", "content": "x" * 70}]})
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert "maximum context length is 64" in answer.error["message"]

    run_lab(test)


def test_counting_is_of_the_prompt_that_would_run(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        prompt = {
            "system": "ab",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "cdé"}]}],
            "tools": TOOLS,
        }
        made = (await lab.post(COUNT, prompt)).json()
        run = await ask(lab, **prompt)
        assert made == {"input_tokens": prompt_tokens(run["usage"])}
        assert made["input_tokens"] == len("abcdé".encode()) + len("gostay")

    run_lab(test, card=HERMES)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"tools": TOOLS}, "tools"),
    ({"output_config": {"effort": "high"}}, "output_config"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"container": "x"}, "container"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"chat_template_kwargs": {"mood": "x"}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_refusal_names_the_field(run_lab: RunLab, path: str) -> None:
    async def test(lab: Lab) -> None:
        for fields, start in REFUSALS:
            answer = await lab.post(path, {**ASK, **fields})
            assert shape(answer) == (400, "invalid_request_error")
            assert answer.error["message"].startswith(f"{start}: "), answer.error
            assert answer.headers["request-id"] == answer.headers["x-request-id"]

    run_lab(test)


def shape(answer: Any) -> tuple[int, str]:
    made = answer.json()
    assert made.keys() == {"type", "error", "request_id"}
    assert made["error"].keys() == {"type", "message"}
    assert made["request_id"] == answer.headers["x-request-id"]
    return answer.status, made["error"]["type"]


def test_every_error_of_these_paths_has_the_other_shape(run_lab: RunLab) -> None:
    config = ServerConfig(key_digests=(key_digest("one"),), limits=Limits(body_bytes=200))
    key = {"x-api-key": "one", "anthropic-version": "2023-06-01"}

    async def test(lab: Lab) -> None:
        assert shape(await lab.post(PATH, ASK)) == (401, "authentication_error")
        assert (await lab.post(PATH, ASK, key)).status == 200
        model = {**ASK, "model": "other"}
        assert shape(await lab.post(PATH, model, key)) == (404, "not_found_error")
        nowhere = f"{PATH}/batches"
        assert shape(await lab.post(nowhere, ASK, key)) == (404, "not_found_error")
        assert shape(await lab.get(PATH, key)) == (405, "invalid_request_error")
        large = {**ASK, "system": "x" * 300}
        assert shape(await lab.post(PATH, large, key)) == (413, "request_too_large")
        many = {f"x-{i}": "1" for i in range(200)}
        assert shape(await lab.post(PATH, ASK, many)) == (431, "invalid_request_error")
        lab.service.drain()
        assert shape(await lab.post(PATH, ASK, key)) == (503, "overloaded_error")
        assert "error" in (await lab.post("/v1/messagesx", ASK, key)).json()
        assert "type" not in (await lab.post("/v1/messagesx", ASK, key)).json()

    run_lab(test, config)


def test_while_loading_the_shape_is_the_same(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for path in (PATH, COUNT):
            answer = await lab.post(path, ASK)
            assert shape(answer) == (503, "overloaded_error")
            assert answer.headers["retry-after"]

    run_lab(test, loaded=False)


def test_a_fault_later_is_told_in_the_stream(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", PATH, {**ASK, "stream": True, "ignore_eos": True})
        lab.session.permits.release(2)
        await live.until(lambda answer: b"text_delta" in answer.body)
        lab.session.fail_next(1)
        lab.session.permits.release(1000)
        (*_, last) = (await live.whole()).named_events()
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")

    run_lab(test, is_open=False)


def test_the_deadline_is_a_timeout(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.post(PATH, ASK)
        assert shape(answer) == (503, "timeout_error")
        assert answer.headers["x-should-retry"] == "false"
        lab.session.permits.release(1000)

    run_lab(test, ServerConfig(request_timeout=0.05), is_open=False)


def test_a_silent_stream_begins_before_its_text(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        live = lab.start("POST", PATH, {**ASK, "stream": True})
        await live.until(lambda answer: b": keep-alive\n\n" in answer.body)
        lab.session.permits.release(1000)
        (begun, *_, ended, _) = (await live.whole()).named_events()
        assert begun["type"] == "message_start"
        assert ended["usage"]["input_tokens"] == len("hello")

    run_lab(test, ServerConfig(keep_alive_seconds=0.01), is_open=False)
