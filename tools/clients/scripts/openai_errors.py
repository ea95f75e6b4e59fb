"""The openai package: which exception each refusal becomes, and what it tries again."""

import time
from typing import Any

import openai
from openai import DefaultHttpxClient, OpenAI
from pydantic import BaseModel

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target


class Flag(BaseModel):
    """Its JSON takes more than two tokens."""

    is_the_flag_up: bool


def _client(target: Target, key: str | None = None, **options: Any) -> OpenAI:
    given: dict[str, Any] = {"max_retries": 0, **options}
    return OpenAI(base_url=target.base, api_key=key or target.key, **given)


def _fields(target: Target, **fields: Any) -> dict[str, Any]:
    given = {
        "model": target.model,
        "messages": raw.conversation(),
        "max_tokens": 4,
        "temperature": 0,
    }
    return {**given, **fields}


def a_wrong_key(target: Target) -> None:
    error = raw.raised(lambda: _client(target, key="wrong").models.list())
    assert isinstance(error, openai.AuthenticationError)
    assert error.code == "invalid_api_key"


def an_unknown_model(target: Target) -> None:
    client = _client(target)
    for work in (
        lambda: client.models.retrieve("no-such-model"),
        lambda: client.chat.completions.create(**_fields(target, model="no-such-model")),
    ):
        error = raw.raised(work)
        assert isinstance(error, openai.NotFoundError)
        assert error.code == "model_not_found"


def a_value_out_of_range(target: Target) -> None:
    error = raw.raised(lambda: _client(target).chat.completions.create(**_fields(target, top_p=7)))
    assert isinstance(error, openai.BadRequestError)
    assert error.param == "top_p"
    assert error.request_id


def a_field_that_is_not_served(target: Target) -> None:
    fields = _fields(target, extra_body={"best_of": 2})
    error = raw.raised(lambda: _client(target).chat.completions.create(**fields))
    assert isinstance(error, openai.BadRequestError)
    assert (error.code, error.param) == ("unsupported_parameter", "best_of")


def a_prompt_beyond_the_context(target: Target) -> None:
    fields = _fields(target, messages=raw.conversation(raw.too_long(target)))
    error = raw.raised(lambda: _client(target).chat.completions.create(**fields))
    assert isinstance(error, openai.BadRequestError)
    assert error.code == "context_length_exceeded"
    assert str(target.context) in error.message


def a_schema_that_is_none(target: Target) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 123}}}
    fields = _fields(target, response_format=schema)
    error = raw.raised(lambda: _client(target).chat.completions.create(**fields))
    assert isinstance(error, openai.BadRequestError)
    assert error.param == "response_format"


def an_answer_cut_short_is_not_parsed(target: Target) -> None:
    fields = _fields(target, response_format=Flag, max_tokens=2)
    error = raw.raised(lambda: _client(target).chat.completions.parse(**fields))
    assert isinstance(error, openai.LengthFinishReasonError)


def embeddings_of_a_text_model(target: Target) -> None:
    error = raw.raised(lambda: _client(target).embeddings.create(model=target.model, input="x"))
    assert isinstance(error, openai.APIStatusError)
    assert error.status_code in (404, 501)


def a_client_that_stops_waiting(target: Target) -> None:
    fields = _fields(target, max_tokens=1500, extra_body={"ignore_eos": True})
    before = raw.total(raw.wait_until_idle(target), "requests_aborted_total")
    error = raw.raised(lambda: _client(target, timeout=0.5).chat.completions.create(**fields))
    assert isinstance(error, openai.APITimeoutError)
    assert raw.total(raw.wait_until_idle(target), "requests_aborted_total") == before + 1


def a_full_queue(target: Target) -> None:
    with raw.full_queue(target):
        error = raw.raised(lambda: _client(target).chat.completions.create(**_fields(target)))
    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.code) == (503, "queue_full")


def a_full_queue_is_tried_again_after_the_time_told(target: Target) -> None:
    seen: list[tuple[int, float]] = []
    with raw.full_queue(target) as free:

        def heard(response: Any) -> None:
            seen.append((response.status_code, time.monotonic()))
            assert response.headers.get("x-should-retry") is None
            free()

        http = DefaultHttpxClient(event_hooks={"response": [heard]})
        client = _client(target, max_retries=2, http_client=http)
        made = client.chat.completions.create(**_fields(target))
    assert made.choices[0].message.content
    assert [status for status, _ in seen] == [503, 200]
    assert seen[1][1] - seen[0][1] >= 1, "retry-after: 1"


def what_cannot_work_is_not_tried_again(target: Target) -> None:
    seen: list[int] = []
    http = DefaultHttpxClient(event_hooks={"response": [lambda r: seen.append(r.status_code)]})
    client = _client(target, max_retries=2, http_client=http)
    raw.raised(lambda: client.chat.completions.create(**_fields(target, top_p=7)))
    assert seen == [400]
