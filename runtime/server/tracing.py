"""What the server tells of each request to whoever traces it. Nobody does unless asked to."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol
from urllib.parse import urlsplit

from starlette.types import Scope

from trtllm_lite.runtime.errors import MissingExtraError, UsageError
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.errors import ApiError

Operation = Literal["chat", "text_completion"]
"""Of GenAI's semantic conventions (`gen_ai.operation.name`)."""
_TRACES_PATH = "/v1/traces"


class RequestTrace(Protocol):
    """Told of one request, in this order. No text of prompts or answers is among it."""

    def planned(self, model: str, params: SamplingParams, *, stream: bool) -> None:
        """The request has been checked. `model`: as the client named it."""

    def took(self, output: RequestOutput) -> None:
        """One of its prompts has run to its end."""

    def failed(self, error: ApiError) -> None:
        """What the client is told instead of an answer, or of the rest of it."""

    def abandoned(self) -> None:
        """The client left."""


class Tracer(Protocol):
    """Makes a trace of each request."""

    def request(self, operation: Operation, scope: Scope) -> AbstractContextManager[RequestTrace]:
        """The request lasts as long as the context. An ApiError that leaves it is a failure."""

    def close(self) -> None:
        """Send what has not been sent. Blocks for some seconds at most."""


class _NoTrace:
    def planned(self, model: str, params: SamplingParams, *, stream: bool) -> None:
        pass

    def took(self, output: RequestOutput) -> None:
        pass

    def failed(self, error: ApiError) -> None:
        pass

    def abandoned(self) -> None:
        pass


class NoTracer:
    """Traces nothing."""

    def __init__(self) -> None:
        self._none: AbstractContextManager[RequestTrace] = nullcontext(_NoTrace())

    def request(self, operation: Operation, scope: Scope) -> AbstractContextManager[RequestTrace]:
        return self._none

    def close(self) -> None:
        pass


def open_tracer(endpoint: str) -> Tracer:
    """Sends spans to an OpenTelemetry collector, by OTLP over HTTP. Raises UsageError for what is
    no http URL, MissingExtraError where OpenTelemetry is not installed."""
    url = traces_url(endpoint)
    try:
        from trtllm_lite.runtime.server.otel_tracer import exporting_tracer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise MissingExtraError("opentelemetry", "otel") from error
    return exporting_tracer(url)


def traces_url(endpoint: str) -> str:
    """Where spans go: an endpoint without a path is a collector's root (OTLP's `/v1/traces`)."""
    parts = urlsplit(endpoint)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        good = False
    if not good or parts.query or parts.fragment:
        allowed = "a URL such as http://127.0.0.1:4318"
        raise UsageError(f"otlp_endpoint: got {endpoint[:200]!r}; allowed: {allowed}")
    return endpoint.rstrip("/") + _TRACES_PATH if parts.path in ("", "/") else endpoint
