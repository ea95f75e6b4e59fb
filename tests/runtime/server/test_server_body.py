"""Request bodies: limits on bytes, time and depth, and nothing but one JSON object."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from trtllm_lite.runtime.server.body import parse_object, read_object, too_deep
from trtllm_lite.runtime.server.errors import ApiError, ClientGoneError
from trtllm_lite.runtime.server.settings import Limits

LIMITS = Limits(body_bytes=100, body_seconds=0.05, depth=5)

values = st.recursive(
    st.none() | st.text(alphabet='[]{}"\\a'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("[]\\", max_size=2), inner),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


@given(values, st.integers(1, 6))
def test_depth_is_that_of_the_parsed_value(value: Any, limit: int) -> None:
    assert too_deep(json.dumps(value).encode(), limit) == (depth_of(value) > limit)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b'"' + b'\\"' * 100_000])
def test_hostile_nesting_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body, Limits())
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"1", b"null", b'"x"', b"true", b'{"a": NaN}', b'{"a": Infinity}'),
        *(b'{"a": "\xff"}', b'{"a": "\\ud800"}', b"{} {}", b"{'a': 1}", b'{"a": 1e999}'),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body, LIMITS)
    assert caught.value.status == 400


def test_the_last_of_duplicate_keys_wins() -> None:
    assert parse_object(b'{"a": 1, "a": 2}', LIMITS) == {"a": 2}


def read(
    chunks: list[bytes], *, headers: dict[str, str] | None = None, limits: Limits = LIMITS
) -> dict[str, Any]:
    """Read a body that arrives in chunks; after them the client is silent."""
    given = {"content-type": "application/json"} if headers is None else headers
    scope = {"headers": [(k.encode(), v.encode()) for k, v in given.items()]}

    async def receive() -> Message:
        if not chunks:
            await asyncio.sleep(60)
        chunk = chunks.pop(0)
        if chunk == b"gone":
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk, "more_body": chunk != b"}"}

    return asyncio.run(read_object(scope, receive, limits))


def test_many_small_chunks_are_one_body() -> None:
    assert read([b'{"a"', b":", b"", b'"b"', b"}"]) == {"a": "b"}


def test_a_large_body_is_parsed_as_well() -> None:
    text = "x" * 200_000
    assert read([b'{"a": "', text.encode(), b'"', b"}"], limits=Limits()) == {"a": text}


@pytest.mark.parametrize(
    ("chunks", "headers", "status"),
    [
        ([b'{"a": "' + b"x" * 100], None, 413),
        ([], {"content-type": "application/json", "content-length": "101"}, 413),
        ([], {"content-type": "application/json", "content-length": "9" * 5000}, 413),
        ([b'{"a"'], None, 408),
        ([b"{", b"}"], {}, 400),
        ([b"{", b"}"], {"content-type": "text/plain"}, 400),
        ([b"{", b"}"], {"content-type": "multipart/form-data"}, 400),
    ],
)
def test_a_body_over_its_limits_is_refused_and_the_connection_closed(
    chunks: list[bytes], headers: dict[str, str] | None, status: int
) -> None:
    with pytest.raises(ApiError) as caught:
        read(chunks, headers=headers)
    assert caught.value.status == status
    assert ("connection", "close") in caught.value.headers


def test_parameters_of_the_content_type_are_no_matter() -> None:
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert read([b"{", b"}"], headers=kind) == {}


def test_a_client_that_leaves_while_it_sends_is_noticed() -> None:
    with pytest.raises(ClientGoneError):
        read([b"{", b"gone"])
