"""Spans of requests: one each, with what the conventions name and no text."""

import asyncio
import gzip
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from trtllm_lite.runtime.errors import MissingExtraError, UsageError
from trtllm_lite.runtime.server.otel_tracer import OtelTracer
from trtllm_lite.runtime.server.settings import ServerConfig
from trtllm_lite.runtime.server.tracing import NoTracer, open_tracer, traces_url

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

CHAT = "/v1/chat/completions"
SECRET = "asecretword"
LONG = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 40, "ignore_eos": True}


class Traced:
    """A tracer whose spans are kept."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracer = OtelTracer(provider)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._kept.get_finished_spans()

    def only(self) -> tuple[ReadableSpan, dict[str, Any]]:
        (span,) = self.spans
        return span, dict(span.attributes or {})


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.tracer.close()


class Collector:
    """Takes what is posted to it, on a port of its own."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        kept = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                kept.append(data)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_span(run_lab: RunLab, traced: Traced, stream: bool) -> None:
    async def test(lab: Lab) -> None:
        lab.service.tracer = traced.tracer
        fields = {"max_tokens": 6, "ignore_eos": True, "stream": stream, "temperature": 0.5}
        await lab.chat(SECRET, model="alias/two", n=2, seed=3, **fields)
        span, found = traced.only()
        assert (span.name, span.kind) == ("chat alias/two", SpanKind.SERVER)
        latencies = {name: found.pop(name) for name in list(found) if ".latency." in name}
        assert found == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "trtllm-lite",
            "http.request.method": "POST",
            "url.path": CHAT,
            "gen_ai.request.model": "alias/two",
            "gen_ai.response.model": "alias/two",
            "gen_ai.request.stream": stream,
            "gen_ai.request.choice.count": 2,
            "gen_ai.request.max_tokens": 6,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.top_k": found["gen_ai.request.top_k"],
            "gen_ai.request.frequency_penalty": 0.0,
            "gen_ai.request.presence_penalty": 0.0,
            "gen_ai.request.seed": 3,
            "gen_ai.usage.input_tokens": len(SECRET),
            "gen_ai.usage.output_tokens": 12,
            "gen_ai.usage.cache_read.input_tokens": found["gen_ai.usage.cache_read.input_tokens"],
            "gen_ai.response.finish_reasons": ("length", "length"),
        }
        first, whole = (latencies[f"gen_ai.latency.{n}"] for n in ("time_to_first_token", "e2e"))
        assert 0 <= latencies["gen_ai.latency.time_in_queue"] <= first <= whole
        assert span.status.status_code is StatusCode.UNSET
        assert SECRET not in span.to_json()

    run_lab(test)


def test_completions_are_told_apart_and_prompts_add_up(run_lab: RunLab, traced: Traced) -> None:
    async def test(lab: Lab) -> None:
        lab.service.tracer = traced.tracer
        await lab.complete(["abc", "de"], max_tokens=4, ignore_eos=True)
        span, found = traced.only()
        assert span.name == "text_completion fake"
        assert found["gen_ai.usage.input_tokens"] == 5
        assert found["gen_ai.usage.output_tokens"] == 8
        assert found["gen_ai.response.finish_reasons"] == ("length", "length")

    run_lab(test)


def test_the_clients_trace_goes_on(run_lab: RunLab, traced: Traced) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    async def test(lab: Lab) -> None:
        lab.service.tracer = traced.tracer
        body = {**LONG, "max_tokens": 1}
        for header in (f"00-{trace}-{parent}-01", "nonsense", f"00-{trace}-{parent}-00"):
            await lab.post(CHAT, body, {"traceparent": header})
        followed, own = traced.spans
        assert followed.context is not None
        assert own.context is not None
        assert followed.parent is not None
        assert format(followed.context.trace_id, "032x") == trace
        assert format(followed.parent.span_id, "016x") == parent
        assert own.parent is None
        assert format(own.context.trace_id, "032x") != trace

    run_lab(test)


def test_refusals_and_faults_have_a_type_and_no_text(run_lab: RunLab, traced: Traced) -> None:
    async def test(lab: Lab) -> None:
        lab.service.tracer = traced.tracer
        await lab.chat(SECRET, temperature=9)
        lab.session.fail_next(1, RuntimeError(SECRET))
        await lab.chat("hello")
        lab.session.fail_next(1, RuntimeError(SECRET))
        await lab.chat("hello", stream=True)
        refused, *broken = traced.spans
        assert refused.attributes is not None
        assert refused.attributes["http.response.status_code"] == 400
        assert refused.attributes["error.type"] == "invalid_request_error"
        assert refused.status.status_code is StatusCode.UNSET
        for span in broken:
            assert span.attributes is not None
            assert span.attributes["error.type"] == "internal_error"
            assert span.status.status_code is StatusCode.ERROR
        assert not [span for span in traced.spans if SECRET in span.to_json()]

    run_lab(test)


def test_a_client_that_leaves_ends_its_span(run_lab: RunLab, traced: Traced) -> None:
    async def test(lab: Lab) -> None:
        lab.service.tracer = traced.tracer
        live = lab.start("POST", CHAT, LONG)
        while not lab.session.entered.is_set():
            await asyncio.sleep(0.001)
        live.leave()
        await live.task
        _, found = traced.only()
        assert found["error.type"] == "client_left"
        assert found["gen_ai.request.model"] == "fake"

    run_lab(test, is_open=False)


def test_nothing_is_traced_unless_asked_for(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        assert isinstance(lab.service.tracer, NoTracer)
        lab.service.tracer.close()

    run_lab(test, ServerConfig())


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector.test/", "https://collector.test/v1/traces"),
        ("http://a.test:1/own/path", "http://a.test:1/own/path"),
    ],
)
def test_an_endpoint_without_a_path_is_a_collector(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint",
    ["", "127.0.0.1:4318", "grpc://a.test:4317", "http://", "http://a.test:x", "http://a/?b=c"],
)
def test_an_endpoint_that_is_none_is_one_line(endpoint: str) -> None:
    with pytest.raises(UsageError, match="otlp_endpoint: got"):
        open_tracer(endpoint)


def test_spans_arrive_where_they_are_sent(run_lab: RunLab, collector: Collector) -> None:
    tracer = open_tracer(collector.url)

    async def test(lab: Lab) -> None:
        lab.service.tracer = tracer
        await lab.chat(SECRET, max_tokens=2)

    run_lab(test)
    tracer.close()
    (body,) = collector.bodies
    assert b"chat fake" in body
    assert b"gen_ai.usage.output_tokens" in body
    assert SECRET.encode() not in body


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    package = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "trtllm_lite.runtime.server.otel_tracer")
    with pytest.raises(MissingExtraError, match=r"pip install 'trtllm-lite\[otel\]'"):
        open_tracer("http://127.0.0.1:4318")


def test_a_server_that_does_not_trace_does_not_import_it() -> None:
    code = (
        "import sys, trtllm_lite.tools.serve_run; "
        "sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
