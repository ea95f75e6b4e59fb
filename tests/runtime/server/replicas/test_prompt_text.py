"""How requests begin, for all forms of text that the routes take."""

import json
from typing import Any

import pytest

from trtllm_lite.runtime.server.replicas.prompt_text import (
    MOST_CHARACTERS,
    asks_for_stream,
    beginning,
)
from trtllm_lite.runtime.server.settings import Limits

USER = {"role": "user", "content": "Hi."}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "Once"}, "Once"),
        ({"prompt": ["Once ", "upon"]}, "Once upon"),
        ({"prompt": [5, 60]}, "5 60 "),
        ({"messages": [{"role": "system", "content": "Be kind. "}, USER]}, "Be kind. Hi."),
        ({"messages": [USER], "system": "Be kind. "}, "Be kind. Hi."),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]}, "Hi."),
        ({"input": "Hi.", "instructions": "Be kind. "}, "Be kind. Hi."),
        ({"model": "m", "messages": None}, ""),
        ({"prompt": {"content": 1.5}}, ""),
        ({"prompt": "x" * 100_000}, "x" * MOST_CHARACTERS),
    ],
)
def test_the_text_of_a_request(body: dict[str, Any], text: str) -> None:
    assert beginning(json.dumps(body).encode(), Limits()) == text


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"prompt":' + b"[" * 1000])
def test_a_body_without_sense_begins_with_nothing(body: bytes) -> None:
    assert beginning(body, Limits()) == ""


@pytest.mark.parametrize(
    ("path", "body", "asks"),
    [
        ("/v1/messages", b'{"stream": true}', True),
        ("/v1/completions", b'{"stream": true}', True),
        ("/v1/completions", b'{"stream": false}', False),
        ("/v1/completions", b'{"stream": 1}', False),
        ("/v1/completions", b"{}", False),
        ("/v1/completions", b'{"stream": true', False),
        ("/tokenize", b'{"stream": true}', False),
    ],
)
def test_who_asks_for_a_stream(path: str, body: bytes, asks: bool) -> None:
    assert asks_for_stream(path, body, Limits()) is asks
