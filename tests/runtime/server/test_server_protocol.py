"""Request models: every field has its range, and every refused one its reason."""

from typing import Any

import pytest

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.capabilities import chat_fields, completion_fields
from trtllm_lite.runtime.server.constraints import grammar_of
from trtllm_lite.runtime.server.convert import chat_ask, completion_asks, text_size
from trtllm_lite.runtime.server.errors import ApiError
from trtllm_lite.runtime.server.parsers.formats import TOOL_FORMATS
from trtllm_lite.runtime.server.protocol.chat import CHAT_REFUSED, ChatRequest
from trtllm_lite.runtime.server.protocol.common import NO_EFFECT, REFUSED, check_refused
from trtllm_lite.runtime.server.protocol.completion import COMPLETION_REFUSED, CompletionRequest
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import Limits
from trtllm_lite.runtime.server.tool_calls import tool_use

HUGE = 2**63
DEFAULTS = SamplingParams(temperature=0.0, top_k=7)
CARD = ModelCard(("m",), 0, "fp", tool_format=TOOL_FORMATS["mistral"])
TOOL = {"type": "function", "function": {"name": "go"}}
MESSAGES = [{"role": "user", "content": "hi"}]
OBJECT = GrammarSpec.json_schema({"type": "object"})

INTEGERS = {
    # field: lowest, highest
    "n": (1, 128),
    "top_k": (-1, HUGE - 1),
    "seed": (-HUGE, HUGE - 1),
    "min_tokens": (0, HUGE - 1),
    "max_tokens": (1, HUGE - 1),
}
FLOATS = {
    "temperature": ((0, 2), (-0.01, 2.01)),
    "top_p": ((0.01, 1), (0, 1.01)),
    "min_p": ((0, 1), (-0.01, 1.01)),
    "repetition_penalty": ((0.1, 5), (0, -1, 1e7)),
    "presence_penalty": ((-2, 2), (-2.1, 2.1)),
    "frequency_penalty": ((-2, 2), (-2.1, 2.1)),
}
FLAGS = ("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs")


def chat(**fields: Any) -> SamplingParams:
    """The sampling parameters of a chat request with these fields."""
    raw = {"messages": MESSAGES, **fields}
    check_refused(raw, REFUSED, CHAT_REFUSED)
    body = ChatRequest.parse(raw)
    tools, grammar = tool_use(body, CARD), grammar_of(body)
    return chat_ask(body, DEFAULTS, Limits(), 100, grammar=grammar, tools=tools).params


def complete(**fields: Any) -> list[SamplingParams]:
    raw = {"prompt": "hi", **fields}
    check_refused(raw, REFUSED, COMPLETION_REFUSED)
    asks = completion_asks(CompletionRequest.parse(raw), DEFAULTS, Limits(), 100)
    return [ask.params for ask in asks]


def refused(call: Any, **fields: Any) -> str:
    """The field that the refusal names."""
    with pytest.raises((ApiError, RequestError)) as caught:
        call(**fields)
    error: Any = caught.value
    assert isinstance(error, RequestError) or error.status == 400
    return str(error.param or "")


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(("name", "bounds"), INTEGERS.items())
def test_integers_have_bounds_and_no_other_type(name: str, bounds: tuple[int, int]) -> None:
    low, high = bounds
    extra = {"max_tokens": high} if name == "min_tokens" else {}
    assert getattr(chat(**{name: low}), name) == low
    assert getattr(chat(**extra, **{name: high}), name) == high
    bads: tuple[Any, ...] = (low - 1, high + 1, 1.5, 1.0, "1", True, [1], {}, float(HUGE))
    for bad in bads:
        assert refused(chat, **{name: bad}) == name


@pytest.mark.parametrize(("name", "cases"), FLOATS.items())
def test_numbers_have_bounds_and_no_other_type(name: str, cases: Any) -> None:
    good: tuple[Any, ...] = cases[0]
    bad: tuple[Any, ...] = cases[1]
    for value in good:
        assert getattr(chat(**{name: value}), name) == value
    others: tuple[Any, ...] = (*bad, "1", True, [1], 1e308, float("nan"), float("inf"))
    for value in others:
        assert refused(chat, **{name: value}) == name


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_booleans(name: str) -> None:
    bads: tuple[Any, ...] = (0, 1, "true", [])
    for bad in bads:
        assert refused(chat, **{name: bad}) == name


@pytest.mark.parametrize("call", [chat, complete])
def test_null_is_as_if_left_out(call: Any) -> None:
    names = [*INTEGERS, *FLOATS, "stream", "stop", "logit_bias", "stream_options", "model"]
    assert call(**dict.fromkeys(names)) == call()
    assert call(**dict.fromkeys((*REFUSED, *CHAT_REFUSED))) == call()


def test_what_a_request_leaves_out_is_as_the_bundle_says() -> None:
    assert (chat().temperature, chat().top_k, chat().max_tokens) == (0.0, 7, None)
    assert complete()[0].max_tokens == 16
    assert chat(max_tokens=3, max_completion_tokens=4).max_tokens == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "2"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": None}, "messages"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [{"type": "x", "function": {"name": "go"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("fly")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("")}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"response_format": {"type": "hiccup"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": schema_format(None)}, "response_format"),
        ({"response_format": schema_format("hiccup")}, "response_format"),
        ({"response_format": schema_format(123)}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"chat_template_kwargs": {"request_id": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ],
)
def test_a_bad_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields) == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"response_format": {"type": "hiccup"}}, "response_format"),
        ({"guided_choice": "a"}, "guided_choice"),
    ],
)
def test_a_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(complete, **fields) == param


@pytest.mark.parametrize("name", sorted({*REFUSED, *CHAT_REFUSED}))
def test_a_refused_field_says_why(name: str) -> None:
    entry = {**REFUSED, **CHAT_REFUSED}[name]
    with pytest.raises(ApiError, match="^" + name) as caught:
        chat(**{name: "anything"})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    for neutral in entry.neutral:
        assert chat(**{name: neutral}) == chat()


def test_fields_that_change_nothing_are_taken() -> None:
    assert chat(**dict.fromkeys(NO_EFFECT, "x"), future_field={"a": 1}) == chat()
    assert chat(response_format={"type": "text"}, tool_choice="none") == chat()


def test_a_text_too_long_for_the_context_is_not_tokenized() -> None:
    fits = [{"role": "user", "content": "x" * (100 * 64 - 15)}]
    assert text_size(fits) == 100 * 64 - 15 + len("roleusercontent")
    chat(messages=[{"role": "user", "content": "x" * 6000}])
    with pytest.raises(
        ApiError, match="this model's maximum context length is 100 tokens; got 64"
    ) as caught:
        chat(messages=[{"role": "user", "content": "x" * 6401}])
    assert caught.value.code == "context_length_exceeded"
    assert refused(complete, prompt=["x" * 4000, "y" * 4000]) == "prompt"


@pytest.mark.parametrize(
    ("model", "table"),
    [
        (ChatRequest, chat_fields(DEFAULTS, tools=True)),
        (CompletionRequest, completion_fields(DEFAULTS)),
    ],
)
def test_capabilities_tell_of_every_field(model: Any, table: dict[str, dict[str, Any]]) -> None:
    assert model.model_fields.keys() <= table.keys()
    assert {row["status"] for row in table.values()} == {"honoured", "no_effect", "refused"}
    assert table["top_k"]["default"] == 7
    assert (table["temperature"]["minimum"], table["temperature"]["maximum"]) == (0, 2)
    assert table["top_p"]["above"] == 0
    assert table["best_of"]["reason"]
    assert table["user"] == {"status": "no_effect"}


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec.json_object()),
        ({"response_format": schema_format({"type": "object"})}, OBJECT),
        ({"guided_json": {"type": "object"}}, OBJECT),
        ({"guided_json": '{"type": "object"}'}, OBJECT),
        ({"structured_outputs": {"json": {"type": "object"}}}, OBJECT),
        ({"guided_regex": "a+"}, GrammarSpec.regex("a+")),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec.regex("a+")),
        ({"guided_choice": ["a", "b"]}, GrammarSpec.choice(["a", "b"])),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec.choice(["a", "b"])),
    ],
)
def test_a_form_becomes_a_grammar(fields: dict[str, Any], spec: GrammarSpec) -> None:
    assert chat(**fields).grammar == spec
    assert complete(**fields)[0].grammar == spec


def test_tools_are_refused_where_the_model_has_no_form_of_calls() -> None:
    body = ChatRequest.parse({"messages": MESSAGES, "tools": [TOOL]})
    told = r"^tools: .*tool-call-parser .*of no help where the template takes no tools$"
    with pytest.raises(ApiError, match=told) as caught:
        tool_use(body, ModelCard(("m",), 0, "fp"))
    assert caught.value.code == "unsupported_parameter"
    assert chat_fields(DEFAULTS, tools=False)["tools"]["status"] == "refused"


def test_tools_that_must_not_be_called_are_as_none() -> None:
    assert chat(tools=[TOOL], tool_choice="none") == chat()
    # The markers of this format are special tokens, which have to be seen.
    assert not chat(tools=[TOOL]).skip_special_tokens
