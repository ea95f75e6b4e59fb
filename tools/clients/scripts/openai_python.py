"""The openai package: chat, text, forms, tools, scores. Its errors: `openai_errors.py`."""

import asyncio
import json
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32}


class City(BaseModel):
    """The model of `raw.SHAPE`."""

    city: Literal["Paris", "London", "Rome"]
    large: bool


def _client(target: Target, **options: Any) -> OpenAI:
    return OpenAI(base_url=target.base, api_key=target.key, max_retries=0, **options)


def _chat(target: Target, **fields: Any) -> Any:
    given = {"model": target.model, "messages": raw.conversation(), **GREEDY, **fields}
    return _client(target).chat.completions.create(**given)


def models(target: Target) -> None:
    client = _client(target)
    assert target.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(target.model).id == target.model


def chat(target: Target) -> None:
    made = _chat(target)
    assert made.choices[0].message.content == raw.chat_text(target)
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].finish_reason in ("stop", "length")
    assert made.id.startswith("chatcmpl-")
    assert made.object == "chat.completion"
    assert made.model == target.model
    assert made._request_id
    usage = made.usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert 1 <= usage.completion_tokens <= 32


def chat_stream(target: Target) -> None:
    whole = _chat(target)
    chunks = list(_chat(target, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    reasons = [part.choices[0].finish_reason for part in parts]
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def chat_stream_helper(target: Target) -> None:
    given: dict[str, Any] = {"model": target.model, "messages": raw.conversation(), **GREEDY}
    with _client(target).chat.completions.stream(**given) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == raw.chat_text(target)


def many_at_once(target: Target) -> None:
    questions = [f"What is {a} plus {a}?" for a in range(8)]
    alone = raw.chat_texts(target, questions, max_tokens=12)

    async def main() -> list[str | None]:
        async with AsyncOpenAI(base_url=target.base, api_key=target.key) as client:
            asked = [
                client.chat.completions.create(
                    model=target.model,
                    messages=raw.conversation(text),
                    temperature=0,
                    max_tokens=12,
                )
                for text in questions
            ]
            return [made.choices[0].message.content for made in await asyncio.gather(*asked)]

    assert asyncio.run(main()) == alone


def choices_with_a_seed(target: Target) -> None:
    fields = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 12}
    first, again = (_chat(target, **fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1


def stop_strings(target: Target) -> None:
    whole = raw.chat_text(target)
    stop = whole.split()[2]
    made = _chat(target, stop=[stop]).choices[0]
    assert made.message.content == whole[: whole.index(stop)]
    assert made.finish_reason == "stop"


def length(target: Target) -> None:
    made = _chat(target, max_completion_tokens=5, extra_body={"ignore_eos": True})
    assert made.choices[0].finish_reason == "length"
    assert made.usage.completion_tokens == 5


def chat_logprobs(target: Target) -> None:
    made = _chat(target, logprobs=True, top_logprobs=3, max_tokens=8).choices[0]
    scored = made.logprobs.content
    assert "".join(token.token for token in scored) == made.message.content
    for token in scored:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
        assert token.top_logprobs[0].logprob == token.logprob
        assert bytes(token.bytes).decode() == token.token


def logit_bias(target: Target) -> None:
    (token,) = raw.tokens_of(target, " cat")
    made = _chat(target, logit_bias={str(token): 100}, max_tokens=4)
    assert made.choices[0].message.content == " cat" * 4


def completions(target: Target) -> None:
    client = _client(target)
    prompt = "The capital of France is"
    want = raw.complete(target, prompt, max_tokens=8)["choices"][0]["text"]
    ids = raw.tokens_of(target, prompt)
    for given in (prompt, ids):
        made = client.completions.create(
            model=target.model, prompt=given, temperature=0, max_tokens=8
        )
        assert made.choices[0].text == want
    both = client.completions.create(
        model=target.model, prompt=[prompt, "One, two,"], temperature=0, max_tokens=8
    )
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == want
    parts = client.completions.create(
        model=target.model, prompt=prompt, temperature=0, max_tokens=8, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == want


def scores_of_a_prompt(target: Target) -> None:
    prompt = "The capital of France is Paris"
    made = _client(target).completions.create(
        model=target.model, prompt=prompt, max_tokens=0, echo=True, logprobs=1
    )
    scores = made.choices[0].logprobs
    assert made.choices[0].text == prompt
    assert len(scores.tokens) == len(raw.tokens_of(target, prompt))
    assert "".join(scores.tokens) == prompt
    assert scores.token_logprobs[0] is None
    assert all(score <= 0 for score in scores.token_logprobs[1:])


def parse(target: Target) -> None:
    made = _client(target).chat.completions.parse(
        model=target.model,
        messages=raw.conversation("Paris is a large city. Answer as JSON."),
        response_format=City,
        temperature=0,
        max_tokens=64,
    )
    found = made.choices[0].message.parsed
    assert isinstance(found, City)
    assert City.model_validate_json(made.choices[0].message.content) == found


def json_object(target: Target) -> None:
    made = _chat(
        target,
        messages=raw.conversation('Answer with the JSON {"city": "Paris"}'),
        response_format={"type": "json_object"},
        max_tokens=200,
    ).choices[0]
    if made.finish_reason == "stop":
        assert isinstance(json.loads(made.message.content), dict)
    else:
        assert made.finish_reason == "length"
        assert made.message.content.startswith("{")


def a_named_tool(target: Target) -> None:
    choice = {"type": "function", "function": {"name": "show_city"}}
    fields: dict[str, Any] = {"tools": [raw.TOOL], "tool_choice": choice, "max_tokens": 64}
    made = _chat(target, **fields).choices[0]
    (call,) = made.message.tool_calls
    assert made.finish_reason == "tool_calls"
    assert call.function.name == "show_city"
    City.model_validate_json(call.function.arguments)
    parts = [chunk.choices[0].delta for chunk in _chat(target, **fields, stream=True)]
    calls = [part for delta in parts for part in delta.tool_calls or []]
    assert calls[0].function.name == "show_city"
    assert calls[0].id
    arguments = "".join(part.function.arguments or "" for part in calls)
    assert json.loads(arguments) == json.loads(call.function.arguments)


def a_tools_result(target: Target) -> None:
    """The whole round: a call that is required, its result, and an answer in words."""
    first = _chat(target, tools=[raw.TOOL], tool_choice="required", max_tokens=96)
    call = first.choices[0].message.tool_calls[0]
    messages = [
        *raw.conversation(),
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "It is shown."},
    ]
    made = _chat(target, messages=messages, tools=[raw.TOOL], tool_choice="none")
    assert made.choices[0].message.content.strip()
    assert made.choices[0].message.tool_calls is None


def a_tool_of_a_model(target: Target) -> None:
    made = _client(target).chat.completions.parse(
        model=target.model,
        messages=raw.conversation(),
        tools=[openai.pydantic_function_tool(City)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=64,
    )
    call = made.choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, City)
