"""The litellm package: its names for our answers and refusals."""

import json
from typing import Any

import litellm

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target


def _fields(target: Target, **fields: Any) -> dict[str, Any]:
    given = {
        "model": f"openai/{target.model}",
        "api_base": target.base,
        "api_key": target.key,
        "messages": raw.conversation(),
        **{"temperature": 0, "max_tokens": 32, "num_retries": 0, "max_retries": 0},
    }
    return {**given, **fields}


def completion(target: Target) -> None:
    made = litellm.completion(**_fields(target))
    assert made.choices[0].message.content == raw.chat_text(target)
    usage = made.usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens


def stream(target: Target) -> None:
    options = {"include_usage": True}
    parts = list(litellm.completion(**_fields(target, stream=True, stream_options=options)))
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    want = raw.chat(target)
    assert text == want["choices"][0]["message"]["content"]
    built = litellm.stream_chunk_builder(parts, messages=raw.conversation())
    assert built.choices[0].message.content == text
    assert built.usage.total_tokens == want["usage"]["total_tokens"]


def text_completion(target: Target) -> None:
    prompt = "The capital of France is"
    fields = _fields(target, prompt=prompt, max_tokens=8)
    fields["model"] = f"text-completion-openai/{target.model}"
    del fields["messages"]
    made = litellm.text_completion(**fields)
    assert made.choices[0].text == raw.complete(target, prompt, max_tokens=8)["choices"][0]["text"]


def a_tool(target: Target) -> None:
    choice = {"type": "function", "function": {"name": "show_city"}}
    made = litellm.completion(
        **_fields(target, tools=[raw.TOOL], tool_choice=choice, max_tokens=64)
    )
    (call,) = made.choices[0].message.tool_calls
    assert call.function.name == "show_city"
    assert set(json.loads(call.function.arguments)) == {"city", "large"}


def errors(target: Target) -> None:
    for fields, kind in (
        ({"api_key": "wrong"}, litellm.exceptions.AuthenticationError),
        ({"top_p": 7}, litellm.exceptions.BadRequestError),
        (
            {"messages": raw.conversation(raw.too_long(target))},
            litellm.exceptions.ContextWindowExceededError,
        ),
    ):
        given = _fields(target, **fields)
        error = raw.raised(litellm.completion, **given)
        assert isinstance(error, kind), f"{list(fields)}: {type(error).__name__}: {error}"


def a_full_queue(target: Target) -> None:
    with raw.full_queue(target):
        error = raw.raised(lambda: litellm.completion(**_fields(target)))
    assert isinstance(error, litellm.exceptions.ServiceUnavailableError), type(error).__name__
