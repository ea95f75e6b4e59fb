"""What a request asks of its answer, and what it brings along, through the whole server: cases 16
to 28 of docs/robustness.md. After each of them the server answers as before."""

import asyncio
import math
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import orjson
import pytest

from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import Limits, ServerConfig

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
HERMES = ModelCard(("fake",), 0, "fp", tool_format=TOOL_FORMATS["hermes"])


def test_a_stop_ends_the_text_wherever_its_characters_come_from(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        fields = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 3}
        text = (await lab.complete("hello", **fields)).json()["choices"][0]["text"]
        assert len(text) > 10
        for stop in (text[4], text[4:6], text[4:9], [text[6], text[4]]):
            first = min(text.index(s) for s in ([stop] if isinstance(stop, str) else stop))
            for stream in (False, True):
                answer = await lab.complete("hello", **fields, stop=stop, stream=stream)
                assert whole_text(answer, stream) == text[:first]

    run_lively(test)


def test_a_stop_of_a_character_of_two_tokens(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        first, second = lab.llm.tokenizer.encode("é")
        bias = {str(first): 100}
        fields = {"max_tokens": 20, "temperature": 1.0, "seed": 1}
        made = await lab.complete("x", **fields, guided_regex="(é|a)+", logit_bias=bias)
        assert made.status == 200, made.body
        text = made.json()["choices"][0]["text"]
        assert "é" in text
        for stream in (False, True):
            answer = await lab.complete(
                "x", **fields, guided_regex="(é|a)+", logit_bias=bias, stop="é", stream=stream
            )
            assert whole_text(answer, stream) == text[: text.index("é")]
        assert second != first

    run_lively(test)


def whole_text(answer: Any, stream: bool) -> str:
    assert answer.status == 200, answer.body
    if not stream:
        text: str = answer.json()["choices"][0]["text"]
        return text
    return "".join(c["text"] for e in answer.events()[:-1] for c in e["choices"])


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a"] * 17, [5], {"a": 1}])
def test_a_bad_stop_is_refused(run_lively: RunLab, stop: Any) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.complete(stop=stop)
        answer.check_refused()
        assert answer.error["param"] == "stop"

    run_lively(test)


def test_a_bias_against_all_other_tokens_leaves_one(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        (wanted,) = lab.llm.tokenizer.encode("q")
        bias = {str(i): -100 for i in range(84) if i != wanted}
        answer = await lab.complete("hello", logit_bias=bias, temperature=1.0, max_tokens=7)
        assert answer.json()["choices"][0]["text"] == "q" * 7
        for bad in ("84", "-1", "x", str(2**63)):
            (await lab.complete(logit_bias={bad: 1})).check_refused()

    run_lively(test)


def test_more_than_twenty_logprobs_are_refused(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        (await lab.chat(logprobs=True, top_logprobs=21)).check_refused()
        (await lab.complete(logprobs=21)).check_refused()
        assert (await lab.chat(logprobs=True, top_logprobs=20, max_tokens=1)).status == 200

    run_lively(test)


def schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


FORMATS = {
    "unknown type": {"type": "hiccup"},
    "no type": {},
    "no object": "json",
    "no schema": {"type": "json_schema"},
    "null schema": schema_format(None),
    "text for a schema": schema_format("hiccup"),
    "number for a schema": schema_format(123),
    "unknown JSON type": schema_format({"type": "hiccup"}),
    "number for a JSON type": schema_format({"type": 123}),
    "bad regex": schema_format({"type": "string", "pattern": "("}),
    "unsupported keyword": schema_format({"type": "array", "contains": {"type": "string"}}),
    "dangling reference": schema_format({"$ref": "#/nowhere"}),
    "nested 500 levels": schema_format(
        orjson.loads(b'{"properties":{"a":' * 60 + b"{}" + b"}}" * 60)
    ),
}


@pytest.mark.parametrize("given", FORMATS.values(), ids=FORMATS)
def test_a_bad_form_is_refused_by_name(run_lively: RunLab, given: Any) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.chat(response_format=given)
        answer.check_refused()
        assert answer.error["param"] == "response_format"

    run_lively(test, ServerConfig(limits=Limits(depth=1000)))


HOSTILE = [
    {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}},
    {"guided_json": {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#"}},
    {"guided_regex": "a{1,100000}"},
    {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    {"guided_regex": "(a+)+$"},
    {"guided_regex": "(a|aa|aaa)*b"},
    {"guided_choice": ["x" * 1000] * 1000},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=lambda f: str(f)[:40])
def test_a_costly_form_is_served_or_refused(run_lively: RunLab, fields: dict[str, Any]) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.chat(max_tokens=4, **fields)
        if answer.status != 200:
            answer.check_refused()
            assert answer.error["param"] == next(iter(fields))

    run_lively(test)


def test_a_form_that_takes_long_to_compile_holds_up_nobody(
    run_lively: RunLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(lab: Lab) -> None:
        may_go, inside = threading.Event(), threading.Event()
        compiler = lab.llm._maker._grammars
        real = compiler.compile

        def slow(spec: Any) -> Any:
            inside.set()
            assert may_go.wait(20)
            return real(spec)

        monkeypatch.setattr(compiler, "compile", slow)
        waits = asyncio.ensure_future(lab.chat(guided_regex="a+", max_tokens=2))
        while not inside.is_set():
            await asyncio.sleep(0.001)
        others = await asyncio.gather(*(lab.chat(stream=True, max_tokens=9) for _ in range(3)))
        assert [answer.status for answer in others] == [200] * 3
        assert not waits.done()
        may_go.set()
        assert (await waits).status == 200

    run_lively(test)


def test_a_form_cut_by_its_length_is_the_beginning_of_one(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.chat(guided_regex=r'\{"name": "[a-z]{20}"\}', max_tokens=3)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length"
        assert '{"name": "'.startswith(choice["message"]["content"])
        assert len(choice["message"]["content"]) == 3

    run_lively(test)


TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}
CHOICES: tuple[tuple[Any, bool], ...] = (
    ("none", True),
    ("auto", True),
    ("required", True),
    ({"type": "function", "function": {"name": "go"}}, True),
    ({"type": "function", "function": {"name": "fly"}}, False),
    ({"type": "function", "function": {"name": ""}}, False),
    ({"type": "function"}, False),
    ("maybe", False),
    ({}, False),
    (5, False),
)


@pytest.mark.parametrize(("choice", "good"), CHOICES, ids=str)
def test_every_form_of_tool_choice(run_lively: RunLab, choice: Any, good: bool) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.chat(tools=[TOOL], tool_choice=choice, max_tokens=8)
        if good:
            assert answer.status == 200, answer.body
        else:
            answer.check_refused()
            assert answer.error["param"] == "tool_choice"
        (await lab.chat(tools=[], tool_choice="auto")).check_refused()

    run_lively(test, card=HERMES)


def test_a_tool_result_without_its_call(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        orphan = {"role": "tool", "tool_call_id": "call_nobody", "content": "42"}
        answer = await lab.post(CHAT, {"messages": [*MESSAGES, orphan], "max_tokens": 2})
        assert answer.status == 200
        calls = {"role": "assistant", "tool_calls": [{"id": 5, "function": "x"}]}
        answer = await lab.post(CHAT, {"messages": [*MESSAGES, calls, orphan], "max_tokens": 2})
        assert answer.status == 200 or answer.check_refused() is None

    run_lively(test)


def test_a_template_of_the_client_is_refused(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        cases: tuple[dict[str, Any], ...] = (
            {"chat_template": "{{ 1 }}"},
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            {"chat_template_kwargs": {"tokenize": True}},
            {"chat_template_kwargs": {"tools": []}},
        )
        for fields in cases:
            (await lab.chat(**fields)).check_refused()
            (await lab.post("/tokenize", {"messages": MESSAGES, **fields})).check_refused()

    run_lively(test)


def test_nothing_that_a_client_names_is_fetched(run_lively: RunLab) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"

        async def test(lab: Lab) -> None:
            image = {"type": "image_url", "image_url": {"url": url}}
            sound = {"type": "input_audio", "input_audio": {"data": url}}
            for part in (image, sound, {"type": "file", "file": {"file_id": url}}):
                content = [{"type": "text", "text": "a"}, part]
                answer = await lab.chat(content, max_tokens=1)
                answer.check_refused()
                assert part["type"] in answer.error["message"]
            picture = await lab.chat(f"![x]({url})", max_tokens=1)
            assert picture.status == 200
            shown = await lab.chat(f'<img src="{url}">', max_tokens=1)
            assert shown.status == 200 or shown.check_refused() is None

        run_lively(test, room=256)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_special_tokens_in_a_message_are_special_tokens(run_lively: RunLab) -> None:
    """As in vLLM and transformers, and as documented: see `Tokenizer`."""

    async def test(lab: Lab) -> None:
        made = await lab.post("/tokenize", {"messages": [{"role": "user", "content": "a<eos>b"}]})
        a, b = lab.llm.tokenizer.encode("ab")
        assert made.json()["tokens"] == [a, 0, b]
        apart = await lab.post("/tokenize", {"prompt": "a<eos"})
        assert apart.json()["count"] == len("a<eos")

    run_lively(test)


def test_numbers_in_answers_are_finite(run_lively: RunLab) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.chat(logprobs=True, top_logprobs=20, max_tokens=5)
        for entry in answer.json()["choices"][0]["logprobs"]["content"]:
            assert all(math.isfinite(top["logprob"]) for top in entry["top_logprobs"])

    run_lively(test)
