"""The instructor package: objects out of answers, and another try where one does not fit."""

import json
from typing import Any, Literal

import instructor
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, field_validator

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target

MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)


class City(BaseModel):
    """Shows a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "London", "Rome"]
    large: bool


class NoCity(City):
    """No text fits."""

    @field_validator("city")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise ValueError(f"{value} is none")


def _client(target: Target, mode: Any) -> Any:
    client = OpenAI(base_url=target.base, api_key=target.key, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def _fields(target: Target, **fields: Any) -> dict[str, Any]:
    messages = raw.conversation("Paris is a large city.")
    given = {"model": target.model, "messages": messages, "temperature": 0, "max_tokens": 64}
    return {**given, **fields}


def an_object(target: Target) -> None:
    for mode in MODES:
        made = _client(target, mode).chat.completions.create(
            **_fields(target), response_model=City, max_retries=0
        )
        assert isinstance(made, City), mode


def an_object_and_the_answer(target: Target) -> None:
    for mode in MODES:
        made, answer = _client(target, mode).chat.completions.create_with_completion(
            **_fields(target), response_model=City, max_retries=0
        )
        message = answer.choices[0].message
        calls = message.tool_calls
        text = calls[0].function.arguments if calls else message.content
        assert json.loads(text) == made.model_dump(), mode


def growing_objects(target: Target) -> None:
    for mode in MODES:
        parts = list(
            _client(target, mode).chat.completions.create_partial(
                **_fields(target), response_model=City, max_retries=0
            )
        )
        last = parts[-1]
        assert last.city in ("Paris", "London", "Rome"), mode
        assert isinstance(last.large, bool), mode


def an_object_that_never_fits(target: Target) -> None:
    for mode in MODES:
        seen: list[Any] = []
        client = _client(target, mode)
        client.on("completion:response", seen.append)
        fields = _fields(target, max_tokens=96, response_model=NoCity, max_retries=2)
        error = raw.raised(client.chat.completions.create, **fields)
        assert isinstance(error, InstructorRetryException), mode
        assert "is none" in str(error), mode
        assert len(seen) >= 2, mode


def an_answer_cut_short(target: Target) -> None:
    for mode in MODES:
        client = _client(target, mode)
        fields = _fields(target, max_tokens=3, response_model=City, max_retries=0)
        error = raw.raised(client.chat.completions.create, **fields)
        assert isinstance(error, IncompleteOutputException | InstructorRetryException), mode
        assert "incomplete" in str(error).lower(), mode
