"""What a connection gets that is one too many."""

from starlette.types import Receive, Scope, Send

from trtllm_lite.runtime.server.errors import ApiError, unavailable
from trtllm_lite.runtime.server.metrics import Metrics
from trtllm_lite.runtime.server.responses import error_response

RETRY_SECONDS = 1


class Overflow:
    """An ASGI application that answers every request with 503 and ends the connection."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self._most = most
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.rejected("too_many_connections")
        await error_response(self._refusal(), scope)(scope, receive, send)

    def _refusal(self) -> ApiError:
        message = f"more than {self._most} connections are open"
        error = unavailable(message, "too_many_connections", RETRY_SECONDS)
        error.headers = (*error.headers, ("connection", "close"))
        return error
