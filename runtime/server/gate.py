"""Answers 503 until the models are loaded, but for the probes, the metrics, and the pages, which
tell how far loading is."""

from starlette.types import ASGIApp, Receive, Scope, Send

from trtllm_lite.runtime.server.auth import HEALTH_PATHS
from trtllm_lite.runtime.server.responses import error_response
from trtllm_lite.runtime.server.service import Service

_OPEN = HEALTH_PATHS | {"/metrics"}


class LoadingGate:
    """Routes behind it may rely on a model, except those of the `pages`."""

    def __init__(self, app: ASGIApp, service: Service, pages: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._open = _OPEN | pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loading = not self._service.models and scope["type"] == "http"
        if loading and scope["path"] not in self._open:
            self._service.metrics.rejected("loading")
            await error_response(self._service.refusal(), scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)
