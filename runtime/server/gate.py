"""Answers 503 for everything but the probes until a model is loaded."""

from starlette.types import ASGIApp, Receive, Scope, Send

from trtllm_lite.runtime.server.auth import HEALTH_PATHS
from trtllm_lite.runtime.server.responses import error_response
from trtllm_lite.runtime.server.service import Service


class LoadingGate:
    """Routes behind it may rely on a model."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loading = not self._service.models and scope["type"] == "http"
        if loading and scope["path"] not in HEALTH_PATHS:
            self._service.metrics.rejected("loading")
            await error_response(self._service.refusal())(scope, receive, send)
            return
        await self._app(scope, receive, send)
