"""Error bodies: OpenAI's shape, bounded, and without what no client should see."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.runtime.errors import (
    ContextLengthError,
    EngineDeadError,
    RequestError,
    StepError,
)
from trtllm_lite.runtime.server.errors import (
    MAX_BODY,
    ApiError,
    clean,
    error_body,
    from_exception,
)


@given(st.text(alphabet=st.characters()), st.none() | st.text(alphabet=st.characters()))
def test_a_body_is_bounded_one_line_json(message: str, param: str | None) -> None:
    body = error_body(ApiError(400, message * 50, param=param))
    assert len(body) <= MAX_BODY
    error = orjson.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].isprintable()


def test_a_short_message_is_whole() -> None:
    error = orjson.loads(error_body(ApiError(400, "n: got 0", param="n", code="x")))["error"]
    assert error == {
        "message": "n: got 0",
        "type": "invalid_request_error",
        "param": "n",
        "code": "x",
    }


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("no /some/secret/file.bin here", "no <path> here"),
        ("<X object at 0x7f3a21b0>", "<X object at 0x...>"),
        ("two\nlines\x1b[0m", "two lines?[0m"),
        ("temperature: allowed 0/1", "temperature: allowed 0/1"),
        ("see /v1", "see /v1"),
        ("use /v1/chat/completions", "use /v1/chat/completions"),
        ("see https://host/a/b", "see https://host/a/b"),
    ],
)
def test_paths_addresses_and_control_characters_go(text: str, kept: str) -> None:
    assert clean(text) == kept


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("n", "got 0"), 400, None),
        (ContextLengthError("prompt", "too long"), 400, "context_length_exceeded"),
        (EngineDeadError("closed"), 503, "engine_dead"),
        (StepError("no memory"), 500, "internal_error"),
        (KeyError("secret"), 500, "internal_error"),
    ],
)
def test_every_exception_has_an_answer(error: Exception, status: int, code: str | None) -> None:
    told = from_exception(error)
    assert (told.status, told.code) == (status, code)
    assert "secret" not in told.message
