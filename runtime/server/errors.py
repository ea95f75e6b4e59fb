"""Every error that a client can see, and the one writer of them.

Which shape its JSON has is told by the path (`error_shapes`). A body is at most MAX_BODY bytes and
holds no path, address or traceback.
"""

import re
from typing import Any

import orjson

from trtllm_lite.runtime.errors import (
    BusyError,
    ContextLengthError,
    EngineDeadError,
    MissingExtraError,
    RequestError,
    StepError,
    TrtllmLiteError,
)
from trtllm_lite.runtime.server.error_shapes import ErrorFacts, shaped

MAX_BODY = 2048
_FINAL = (("x-should-retry", "false"),)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
# Routes of this server are none of its file system's.
_PATH = re.compile(r"(?<![\w/:.])/(?!v1/)(?:[\w.+@-]+/)+[\w.+@-]*")


class ApiError(Exception):
    """An answer that is not 200. `message` is one line for the caller. `headers` go with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers


class ClientGoneError(Exception):
    """The client has closed its connection, or takes nothing any more: nobody reads an answer."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    """503 that a client may try again after `retry_after` seconds."""
    headers = (("retry-after", str(retry_after)),)
    return ApiError(503, message, kind="unavailable_error", code=code, headers=headers)


def deadline_passed(seconds: float) -> ApiError:
    """503 for a request that took too long. The same request would take as long again, so clients
    that retry by themselves are told not to."""
    return ApiError(
        503,
        f"the request took longer than {seconds:g} s; ask for fewer tokens, or raise "
        "--request-timeout",
        kind="unavailable_error",
        code="deadline_exceeded",
        headers=_FINAL,
    )


def from_exception(error: Exception) -> ApiError:
    """What the client is told of any exception. What is not meant for users becomes 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return invalid(str(error), error.param, "context_length_exceeded")
    if isinstance(error, RequestError):
        return invalid(str(error), error.param)
    if isinstance(error, EngineDeadError):
        return unavailable("the engine has stopped", "engine_dead", 5)
    if isinstance(error, BusyError):
        return unavailable(str(error), "busy", 1)
    if isinstance(error, MissingExtraError):
        # Not implemented here: trying again would not help.
        return ApiError(501, str(error), kind="server_error", code="missing_extra", headers=_FINAL)
    if isinstance(error, StepError | TrtllmLiteError):
        return server_error(str(error))
    return server_error("internal error; the server's log has it under this request id")


def server_error(message: str) -> ApiError:
    """500: our fault."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def error_body(error: ApiError, path: str = "", request_id: str | None = None) -> bytes:
    """The JSON of an error, for a client that asked for that path."""
    return orjson.dumps(error_object(error, path, request_id))


def error_object(error: ApiError, path: str = "", request_id: str | None = None) -> dict[str, Any]:
    """The same as an object: for streams, which end with it."""
    message, param = clean(error.message), None if error.param is None else clean(error.param)[:100]
    for size in (1200, 600, 300):
        shown = message if len(message) <= size else f"{message[:size]}..."
        facts = ErrorFacts(error.status, shown, error.kind, param, error.code, request_id)
        made = shaped(facts, path)
        if len(orjson.dumps(made)) <= MAX_BODY:
            break
    return made


def clean(text: str) -> str:
    """One printable line without absolute paths, memory addresses and lone surrogates."""
    line = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return _ADDRESS.sub("0x...", _PATH.sub("<path>", line))
