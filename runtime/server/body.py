"""Read a request body under limits, and parse it as one JSON object."""

import asyncio
import re
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from trtllm_lite.runtime.server.errors import ApiError, ClientGoneError, invalid
from trtllm_lite.runtime.server.settings import Limits

_CLOSE = (("connection", "close"),)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_LARGE = 64 * 2**10
"""Bytes from which on parsing is too long a pause for the event loop."""


async def read_object(scope: Scope, receive: Receive, limits: Limits) -> dict[str, Any]:
    """The JSON object in the body. Raises ApiError (400, 408, 413), ClientGoneError."""
    _check_type(Headers(scope=scope).get("content-type"))
    body = await read_body(scope, receive, limits)
    if len(body) < _LARGE:
        return parse_object(body, limits)
    return await asyncio.get_running_loop().run_in_executor(None, parse_object, body, limits)


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The body as it is. Raises ApiError (408, 413), ClientGoneError."""
    _check_declared(Headers(scope=scope).get("content-length"), limits)
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read(receive, limits)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_seconds:g} s"
        raise ApiError(408, message, code="body_timeout", headers=_CLOSE) from None


def parse_object(body: bytes, limits: Limits) -> dict[str, Any]:
    """The JSON object that `body` is. The last of duplicate keys wins. Raises ApiError for what is
    not UTF-8, not JSON (NaN is not), nested too deeply, or no object."""
    if too_deep(body, limits.depth):
        raise invalid(f"the JSON is nested deeper than {limits.depth} levels, or unbalanced")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"the body is a JSON {_kind(value)}; allowed: an object")
    return value


def too_deep(body: bytes, limit: int) -> bool:
    """Whether brackets outside strings nest deeper than `limit`, or do not match up. Takes a
    bounded number of linear passes: each one takes away the innermost level."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    left = _STRING.sub(b"", body).translate(_BRACKETS, _OTHERS)
    for _ in range(limit):
        if not left:
            return False
        left = left.replace(b"[]", b"")
    return bool(left)


async def _read(receive: Receive, limits: Limits) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limits.body_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return bytes(body)


def _check_type(value: str | None) -> None:
    kind = "" if value is None else value.partition(";")[0].strip().lower()
    if kind != "application/json":
        got = "no Content-Type" if value is None else f"Content-Type {value[:60]!r}"
        raise ApiError(400, f"got {got}; allowed: application/json", headers=_CLOSE)


def _check_declared(length: str | None, limits: Limits) -> None:
    if length is not None and length.isdecimal() and int(length[:20]) > limits.body_bytes:
        raise _too_large(limits)


def _too_large(limits: Limits) -> ApiError:
    message = f"the body is larger than {limits.body_bytes} bytes"
    return ApiError(413, message, code="request_too_large", headers=_CLOSE)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names[type(value)]
