"""One OpenTelemetry span a request, under the names of the GenAI semantic conventions (1.41:
opentelemetry.io/docs/specs/semconv/gen-ai), with vLLM's for times. Import it only to trace."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import Scope

from trtllm_lite import __version__
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.errors import ApiError
from trtllm_lite.runtime.server.tracing import Operation, RequestTrace

PROVIDER = "trtllm-lite"
_EXPORT_SECONDS = 5.0
_CONTEXT = TraceContextTextMapPropagator()


def exporting_tracer(url: str) -> "OtelTracer":
    """Sends spans to `url` in batches, from a thread of its own. A collector that is not there
    costs log lines and the spans that no longer fit, never a request."""
    resource = Resource.create({"service.name": PROVIDER, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracer(provider)


class OtelTracer:
    """A `Tracer` on a provider, which it owns."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(__name__, __version__)

    @contextmanager
    def request(self, operation: Operation, scope: Scope) -> Iterator[RequestTrace]:
        """A span of the trace that the client's `traceparent` names, or of one of its own."""
        span = self._tracer.start_span(
            operation,
            context=_CONTEXT.extract(_carrier(scope)),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "http.request.method": str(scope["method"]),
                "url.path": str(scope["path"]),
            },
        )
        trace = OtelTrace(span, operation)
        try:
            yield trace
        except ApiError as error:
            trace.failed(error)
            raise
        except Exception as error:
            trace.broke(error)
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


class OtelTrace:
    """One request as a span."""

    def __init__(self, span: Span, operation: Operation) -> None:
        self._span = span
        self._operation = operation
        self._outputs: list[RequestOutput] = []

    def planned(self, model: str, params: SamplingParams, *, stream: bool) -> None:
        self._span.update_name(f"{self._operation} {model}")
        given: dict[str, AttributeValue | None] = {
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.stream": stream,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.seed": params.seed,
        }
        self._set(given)

    def took(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        choices = [choice for made in self._outputs for choice in made.outputs]
        cached = sum(made.cached_tokens for made in self._outputs)
        counts: dict[str, AttributeValue | None] = {
            "gen_ai.usage.input_tokens": sum(len(made.prompt_token_ids) for made in self._outputs),
            "gen_ai.usage.output_tokens": sum(len(choice.token_ids) for choice in choices),
            "gen_ai.usage.cache_read.input_tokens": cached,
            "gen_ai.response.finish_reasons": [str(c.finish_reason) for c in choices],
        }
        self._set(counts | self._latencies())

    def failed(self, error: ApiError) -> None:
        self._span.set_attribute("http.response.status_code", error.status)
        self._error(error.code or error.kind, server=error.status >= 500)

    def broke(self, error: Exception) -> None:
        """Something that no client is told about."""
        self._error(type(error).__name__, server=True)

    def abandoned(self) -> None:
        self._error("client_left", server=False)

    def _latencies(self) -> dict[str, AttributeValue | None]:
        """Seconds; of several prompts the first token of all, and the last."""
        metrics = [output.metrics for output in self._outputs]
        ends = [m.finished_time - m.arrival_time for m in metrics if m.finished_time is not None]
        return {
            "gen_ai.latency.time_to_first_token": _least(m.ttft for m in metrics),
            "gen_ai.latency.time_in_queue": _least(m.queue_time for m in metrics),
            "gen_ai.latency.e2e": max(ends, default=None),
        }

    def _error(self, name: str, *, server: bool) -> None:
        """What went wrong, by a name of the code's: messages may hold text of the client's."""
        self._span.set_attribute("error.type", name)
        if server:
            self._span.set_status(StatusCode.ERROR, name)

    def _set(self, attributes: dict[str, AttributeValue | None]) -> None:
        self._span.set_attributes({k: v for k, v in attributes.items() if v is not None})


def _carrier(scope: Scope) -> dict[str, str]:
    headers = Headers(scope=scope)
    found = {name: headers.get(name) for name in _CONTEXT.fields}
    return {name: value for name, value in found.items() if value is not None}


def _least(values: Iterator[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
