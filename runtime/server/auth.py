"""API keys: everything is closed to those without one, except the paths named here."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from trtllm_lite.runtime.server.errors import ApiError
from trtllm_lite.runtime.server.responses import error_response

HEALTH_PATHS = frozenset({"/health", "/v1/health", "/live", "/ready"})


class KeyGuard:
    """Lets a request pass that carries one of the keys, as `Authorization: Bearer KEY` or
    `x-api-key: KEY`. Without keys everything passes.

    Looks at the path of the request line alone, as the router does, never at the Host header. Keys
    are compared as sha256 digests, in constant time, and all of them every time.
    """

    def __init__(
        self, app: ASGIApp, digests: tuple[bytes, ...], public: Iterable[str] = HEALTH_PATHS
    ) -> None:
        self._app = app
        self._digests = digests
        self._public = frozenset(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._closed(scope):
            await error_response(_no_key(), scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _closed(self, scope: Scope) -> bool:
        if not self._digests or scope["path"] in self._public:
            return False
        return not self._known(_given_key(Headers(scope=scope)))

    def _known(self, key: str | None) -> bool:
        digest = hashlib.sha256((key or "").encode("utf-8")).digest()
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return key is not None and any(matches)


def _given_key(headers: Headers) -> str | None:
    """The one key of a request; None where there is none, or more than one."""
    bearer = headers.getlist("authorization")
    keys = [value[7:].strip() for value in bearer if value[:7].lower() == "bearer "]
    keys += headers.getlist("x-api-key")
    return keys[0] if len(keys) == 1 else None


def _no_key() -> ApiError:
    message = "no valid API key; send the header 'Authorization: Bearer KEY'"
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")
