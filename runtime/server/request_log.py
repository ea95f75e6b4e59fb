"""The outermost layer: request ids, the access log, and the last net under every error."""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trtllm_lite.runtime.server.error_shapes import is_anthropic
from trtllm_lite.runtime.server.errors import ApiError, from_exception
from trtllm_lite.runtime.server.responses import error_response

ACCESS = "trtllm_lite.access"
"""Name of the logger that gets one record a request, its facts in the attribute `facts`."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CLOSE = (("connection", "close"),)
_log = logging.getLogger(__name__)
_access = logging.getLogger(ACCESS)


class RequestLog:
    """Gives each request an id (that of the client's x-request-id, if it is plain), sends it back,
    and logs one line. Prompts and keys are never logged. Too many headers end a request here."""

    def __init__(self, app: ASGIApp, max_headers: int) -> None:
        self._app = app
        self._max_headers = max_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = _Seen(scope, send)
        try:
            await self._answer(scope, receive, seen)
        finally:
            _access.info("request", extra={"facts": seen.facts()})

    async def _answer(self, scope: Scope, receive: Receive, seen: "_Seen") -> None:
        try:
            if len(scope["headers"]) > self._max_headers:
                raise ApiError(431, f"more than {self._max_headers} headers")
            if _is_ambiguous(Headers(scope=scope)):
                raise ApiError(400, "both Content-Length and Transfer-Encoding", headers=_CLOSE)
            await self._app(scope, receive, seen.send)
        except Exception as error:
            if not isinstance(error, ApiError):
                _log.error("request %s failed", seen.request_id, exc_info=error)
            if seen.status is not None:
                raise
            await error_response(from_exception(error), scope)(scope, receive, seen.send)


def _is_ambiguous(headers: Headers) -> bool:
    """Two statements of where the body ends: the way requests are smuggled past a proxy."""
    return "content-length" in headers and "transfer-encoding" in headers


class _Seen:
    """What one request has come to."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        self.request_id = given if _ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        self.status: int | None = None
        scope.setdefault("state", {})["request_id"] = self.request_id
        self._scope = scope
        self._send = send
        self._start = time.monotonic()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            headers["x-request-id"] = self.request_id
            if is_anthropic(self._scope["path"]):
                headers["request-id"] = self.request_id
            message = {**message, "headers": headers.raw}
        await self._send(message)

    def facts(self) -> dict[str, object]:
        client = self._scope.get("client")
        return {
            "request_id": self.request_id,
            "client": client[0] if client else None,
            "method": self._scope["method"],
            "path": self._scope["path"],
            "status": self.status,
            "seconds": round(time.monotonic() - self._start, 6),
        }
