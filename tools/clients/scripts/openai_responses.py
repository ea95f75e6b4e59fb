"""The openai package: /v1/responses."""

import json
from typing import Any, Literal

import openai
from openai import OpenAI
from pydantic import BaseModel

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target

GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 32}


class City(BaseModel):
    """The model of `raw.SHAPE`."""

    city: Literal["Paris", "London", "Rome"]
    large: bool


def _create(target: Target, **fields: Any) -> Any:
    client = OpenAI(base_url=target.base, api_key=target.key, max_retries=0)
    given = {"model": target.model, "input": raw.QUESTION, **GREEDY, **fields}
    return client.responses.create(**given)


def a_text(target: Target) -> None:
    want = raw.chat(target)
    made = _create(target)
    assert made.output_text == want["choices"][0]["message"]["content"]
    assert made.id.startswith("resp_")
    assert made.object == "response"
    assert made.usage.input_tokens == want["usage"]["prompt_tokens"]
    assert made.usage.output_tokens == want["usage"]["completion_tokens"]
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert made.status == (
        "completed" if want["choices"][0]["finish_reason"] == "stop" else "incomplete"
    )


def instructions_and_a_list_of_messages(target: Target) -> None:
    messages = [{"role": "system", "content": "Answer in French."}, *raw.conversation()]
    body = {"messages": messages, "temperature": 0, "max_tokens": 32}
    want = raw.ask(target, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    made = _create(target, instructions="Answer in French.")
    assert made.output_text == want
    parts = [{"role": "user", "content": [{"type": "input_text", "text": raw.QUESTION}]}]
    made = _create(target, instructions="Answer in French.", input=parts)
    assert made.output_text == want


def a_stream(target: Target) -> None:
    events = list(_create(target, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == _create(target).output_text
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    for kind in ("response.output_item.added", "response.content_part.added"):
        assert kinds.count(kind) == kinds.count(kind.replace("added", "done")) == 1


def a_stream_helper(target: Target) -> None:
    client = OpenAI(base_url=target.base, api_key=target.key, max_retries=0)
    given: dict[str, Any] = {"model": target.model, "input": raw.QUESTION, **GREEDY}
    with client.responses.stream(**given) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text == raw.chat_text(target)


def an_answer_cut_short(target: Target) -> None:
    made = _create(target, input="Tell me a long story.", max_output_tokens=16)
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage.output_tokens == 16


def parse(target: Target) -> None:
    client = OpenAI(base_url=target.base, api_key=target.key, max_retries=0)
    made = client.responses.parse(
        model=target.model,
        input="Paris is a large city. Answer as JSON.",
        text_format=City,
        temperature=0,
        max_output_tokens=64,
    )
    assert isinstance(made.output_parsed, City)


def a_tool(target: Target) -> None:
    function = raw.TOOL["function"]
    tool = {"type": "function", "name": function["name"], "parameters": function["parameters"]}
    fields = {"tools": [tool], "tool_choice": {"type": "function", "name": "show_city"}}
    made = _create(target, **fields, max_output_tokens=64)
    (call,) = [item for item in made.output if item.type == "function_call"]
    assert call.name == "show_city"
    City.model_validate_json(call.arguments)
    events = list(_create(target, **fields, max_output_tokens=64, stream=True))
    kind = "response.function_call_arguments.delta"
    arguments = "".join(event.delta for event in events if event.type == kind)
    assert json.loads(arguments) == json.loads(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is shown."}
    history = [*raw.conversation(), call.model_dump(exclude_none=True), result]
    assert _create(target, input=history).output_text.strip()


def errors(target: Target) -> None:
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"top_p": 7}, openai.BadRequestError),
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"previous_response_id": "resp_none"}, openai.APIStatusError),
        ({"input": raw.too_long(target)}, openai.BadRequestError),
    ]
    for fields, kind in cases:
        error = raw.raised(_create, target=target, **fields)
        assert isinstance(error, kind), f"{list(fields)}: {error}"
        assert 400 <= error.status_code < 500
