"""The anthropic package: /v1/messages and /v1/messages/count_tokens."""

import json
import time
from typing import Any

import anthropic
from anthropic import Anthropic, DefaultHttpxClient

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target

TOOL = {"name": "show_city", "description": "Shows a city.", "input_schema": raw.SHAPE}


def _client(target: Target, key: str | None = None, **options: Any) -> Anthropic:
    given: dict[str, Any] = {"max_retries": 0, **options}
    return Anthropic(base_url=target.url, api_key=key or target.key, **given)


def _fields(target: Target, **fields: Any) -> dict[str, Any]:
    given = {
        "model": target.model,
        "messages": raw.conversation(),
        "max_tokens": 32,
        # No argument of the newest library's any more, but a field of the API.
        "extra_body": {"temperature": 0},
    }
    return {**given, **fields}


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def _input_tokens(message: Any) -> int:
    """Those that were taken from a kept prefix are counted apart."""
    count: int = message.usage.input_tokens + message.usage.cache_read_input_tokens
    return count


def a_message(target: Target) -> None:
    want = raw.chat(target)
    made = _client(target).messages.create(**_fields(target))
    assert _text(made) == want["choices"][0]["message"]["content"]
    assert made.id.startswith("msg_")
    assert (made.type, made.role, made.model) == ("message", "assistant", target.model)
    assert _input_tokens(made) == want["usage"]["prompt_tokens"]
    assert made.usage.output_tokens == want["usage"]["completion_tokens"]
    reasons = {"stop": "end_turn", "length": "max_tokens"}
    assert made.stop_reason == reasons[want["choices"][0]["finish_reason"]]


def a_system_prompt(target: Target) -> None:
    messages = [{"role": "system", "content": "Answer in French."}, *raw.conversation()]
    body = {"messages": messages, "temperature": 0, "max_tokens": 32}
    want = raw.ask(target, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    given: list[Any] = ["Answer in French.", [{"type": "text", "text": "Answer in French."}]]
    for system in given:
        made = _client(target).messages.create(**_fields(target, system=system))
        assert _text(made) == want


def a_stream(target: Target) -> None:
    client = _client(target)
    whole = client.messages.create(**_fields(target))
    with client.messages.stream(**_fields(target)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == _text(whole) == _text(final)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert _input_tokens(final) == _input_tokens(whole)
    kinds = [event.type for event in client.messages.create(**_fields(target, stream=True))]
    order = [kind for kind in kinds if kind not in ("ping", "content_block_delta")]
    assert order == [
        *("message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def stop_sequences(target: Target) -> None:
    whole = raw.chat_text(target)
    stop = whole.split()[2]
    made = _client(target).messages.create(**_fields(target, stop_sequences=[stop]))
    assert _text(made) == whole[: whole.index(stop)]
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)


def counted_tokens(target: Target) -> None:
    client = _client(target)
    given: dict[str, Any] = {
        "model": target.model,
        "messages": raw.conversation(),
        "system": "Be brief.",
    }
    counted = client.messages.count_tokens(**given)
    made = client.messages.create(**given, max_tokens=1)
    assert counted.input_tokens == _input_tokens(made)


def a_named_tool(target: Target) -> None:
    client = _client(target)
    choice = {"type": "tool", "name": "show_city"}
    fields = _fields(target, tools=[TOOL], tool_choice=choice, max_tokens=64)
    made = client.messages.create(**fields)
    (block,) = [block for block in made.content if block.type == "tool_use"]
    assert made.stop_reason == "tool_use"
    assert (block.name, set(block.input)) == ("show_city", {"city", "large"})
    with client.messages.stream(**fields) as stream:
        parts = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(parts)) == block.input
    assert final.content[-1].input == block.input


def a_tools_result(target: Target) -> None:
    client = _client(target)
    fields = _fields(target, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=64)
    first = client.messages.create(**fields)
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is shown."}
    messages = [
        *raw.conversation(),
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]},
        {"role": "user", "content": [result]},
    ]
    fields = _fields(target, messages=messages, tools=[TOOL], tool_choice={"type": "none"})
    made = client.messages.create(**fields)
    assert _text(made).strip()


def errors(target: Target) -> None:
    client = _client(target)
    create = client.messages.create
    error = raw.raised(lambda: _client(target, key="wrong").messages.create(**_fields(target)))
    assert isinstance(error, anthropic.AuthenticationError)
    error = raw.raised(lambda: create(**_fields(target, model="no-such-model")))
    assert isinstance(error, anthropic.NotFoundError)
    error = raw.raised(lambda: create(**_fields(target, extra_body={"top_p": 7})))
    assert isinstance(error, anthropic.BadRequestError)
    assert "top_p" in str(error)
    long = _fields(target, messages=raw.conversation(raw.too_long(target)))
    error = raw.raised(lambda: create(**long))
    assert isinstance(error, anthropic.BadRequestError)
    assert str(target.context) in str(error)
    assert error.body["error"]["type"] == "invalid_request_error"


def a_full_queue_is_tried_again_after_the_time_told(target: Target) -> None:
    seen: list[tuple[int, float]] = []
    with raw.full_queue(target) as free:

        def heard(response: Any) -> None:
            seen.append((response.status_code, time.monotonic()))
            free()

        http = DefaultHttpxClient(event_hooks={"response": [heard]})
        client = _client(target, max_retries=2, http_client=http)
        made = client.messages.create(**_fields(target))
    assert _text(made).strip()
    assert len(seen) == 2
    assert seen[0][0] in (503, 529)
    assert seen[1][0] == 200
    assert seen[1][1] - seen[0][1] >= 1, "retry-after: 1"
