"""What the front looks at in a body that it passes on: how its text begins, for routers that keep
alike prompts together, and whether a stream is asked for."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from trtllm_lite.runtime.server.body import parse_object
from trtllm_lite.runtime.server.errors import ApiError
from trtllm_lite.runtime.server.settings import Limits

MOST_CHARACTERS = 8192
_FIELDS = ("system", "instructions", "messages", "prompt", "input")
"""In the order in which they come to stand in a prompt; no API has more than two of them."""
_INSIDE = ("content", "text")
_STREAMS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""The paths that answer with a stream where a body says so."""


def beginning(body: bytes, limits: Limits) -> str:
    """The first characters of the text in a body; empty where there is none. What is wrong with
    the body is not said here."""
    try:
        fields = parse_object(body, limits)
    except ApiError:
        return ""
    letters = (c for name in _FIELDS for text in _texts(fields.get(name)) for c in text)
    return "".join(islice(letters, MOST_CHARACTERS))


def asks_for_stream(path: str, body: bytes, limits: Limits) -> bool:
    """Whether the answer is to be a stream of events. A body that is wrong asks for none."""
    try:
        return path in _STREAMS and parse_object(body, limits).get("stream") is True
    except ApiError:
        return False


def _texts(value: Any) -> Iterator[str]:
    """Strings at any depth of lists and messages, and token ids. As deep as bodies may be."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int):
        yield f"{value} "
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name in _INSIDE:
            yield from _texts(value.get(name))
