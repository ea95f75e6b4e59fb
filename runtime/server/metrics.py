"""The server's numbers for Prometheus, in a registry of their own. Reading them changes nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from trtllm_lite import __version__
from trtllm_lite.runtime.outputs import RequestMetrics, RequestOutput
from trtllm_lite.runtime.server.engine_metrics import MODEL, PREFIX, EngineCollector, Watched
from trtllm_lite.runtime.server.metric_aliases import vllm_families
from trtllm_lite.runtime.server.model_metrics import ModelCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Outcome = Literal["finished", "aborted", "failed"]
MetricsAlias = Literal["vllm"]
OUTCOMES: tuple[Outcome, ...] = ("finished", "aborted", "failed")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TIME_BUCKETS = (*_SHORT, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_COUNT_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Metrics:
    """Everything that is told of one server. `alias`: whose names the numbers have beside ours;
    `queue_limit`: sequences that may wait."""

    def __init__(self, alias: MetricsAlias | None = None, queue_limit: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._alias = alias
        self._engines = EngineCollector()
        self._facts = ModelCollector(__version__)
        self.registry.register(self._facts)
        self.registry.register(self._engines)
        limit = Gauge(
            PREFIX + "queue_limit", "Sequences that may wait for a slot.", registry=self.registry
        )
        limit.set(queue_limit)
        self._rejected = _counter(self.registry, "requests_rejected", "Not accepted.", "reason")
        self._families = _Families.new(self.registry)
        self._models: dict[str, ModelMetrics] = {}

    def watch(self, model: str, fingerprint: str, facts: Mapping[str, Any], llm: Watched) -> None:
        """Tell of this model too. `facts`: see ModelCollector."""
        self._facts.add(model, fingerprint, facts)
        self._engines.watch(model, llm)
        self.of(model)

    def of(self, model: str) -> "ModelMetrics":
        """Where the requests of a model are counted."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self._families, model)
        return self._models[model]

    def rejected(self, reason: str) -> None:
        """A request was not accepted. Reasons are names from the code, never text of clients."""
        self._rejected.labels(reason).inc()

    def text(self) -> bytes:
        """The exposition. Waits for no engine: their numbers are those after their last step."""
        families = list(self.registry.collect())
        if self._alias == "vllm":
            families += vllm_families(families)
        return generate_latest(_Collected(families))


class ModelMetrics:
    """Counts what happens to the requests of one model. Invariant: `accepted` is the sum of the
    three outcomes and of the requests in flight."""

    def __init__(self, families: "_Families", model: str) -> None:
        self._accepted = families.accepted.labels(model)
        self._in_flight = families.in_flight.labels(model)
        self._outcomes = {name: c.labels(model) for name, c in families.outcomes.items()}
        self._times = {name: h.labels(model) for name, h in families.times.items()}
        self._prompt = families.prompt.labels(model)
        self._generated = families.generated.labels(model)

    def accepted(self) -> None:
        """A request is the engine's now."""
        self._accepted.inc()
        self._in_flight.inc()

    def ended(self, outcome: Outcome) -> None:
        """An accepted request has ended, and how."""
        self._in_flight.dec()
        self._outcomes[outcome].inc()

    def first_token(self, times: RequestMetrics) -> None:
        """A prompt has its first token."""
        self._observe("time_to_first_token", times.ttft)
        self._observe("request_queue_time", times.queue_time)

    def finished(self, output: RequestOutput) -> None:
        """A prompt has run to its end, well or not."""
        self._prompt.observe(len(output.prompt_token_ids))
        for choice in output.outputs:
            self._generated.observe(len(choice.token_ids))
        times = output.metrics
        end, first, begin = times.finished_time, times.first_token_time, times.first_scheduled_time
        self._observe("request_time_per_output_token", times.tpot)
        self._observe("e2e_request_latency", _between(times.arrival_time, end))
        self._observe("request_inference_time", _between(begin, end))
        self._observe("request_prefill_time", _between(begin, first))
        self._observe("request_decode_time", _between(first, end))

    def _observe(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self._times[name].observe(seconds)


_TIMES = (
    ("time_to_first_token", "Arrival to first token."),
    ("request_queue_time", "Arrival to first slot."),
    ("request_time_per_output_token", "Mean time per token after the first, of a request."),
    ("e2e_request_latency", "Arrival to last token."),
    ("request_inference_time", "First slot to last token."),
    ("request_prefill_time", "First slot to first token."),
    ("request_decode_time", "First to last token."),
)


@dataclass(frozen=True)
class _Families:
    """All that a model's requests are counted in."""

    accepted: Counter
    in_flight: Gauge
    outcomes: Mapping[Outcome, Counter]
    times: Mapping[str, Histogram]
    prompt: Histogram
    generated: Histogram

    @classmethod
    def new(cls, registry: CollectorRegistry) -> "_Families":
        def counter(name: str, text: str) -> Counter:
            return _counter(registry, name, text, MODEL)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(PREFIX + name, text, (MODEL,), registry=registry, buckets=buckets)

        return cls(
            accepted=counter("requests_accepted", "Requests given to the engine."),
            in_flight=Gauge(
                PREFIX + "requests_in_flight", "Accepted, not ended.", (MODEL,), registry=registry
            ),
            outcomes={
                "finished": counter("requests_finished", "Requests answered to their end."),
                "aborted": counter("requests_aborted", "Requests whose client left."),
                "failed": counter("requests_failed", "Requests that ended with an error."),
            },
            times={n: histogram(f"{n}_seconds", text, _TIME_BUCKETS) for n, text in _TIMES},
            prompt=histogram("request_prompt_tokens", "Tokens of a prompt.", _COUNT_BUCKETS),
            generated=histogram(
                "request_generation_tokens", "Tokens of a choice that has ended.", _COUNT_BUCKETS
            ),
        )


def _counter(registry: CollectorRegistry, name: str, text: str, label: str) -> Counter:
    return Counter(PREFIX + name, text, (label,), registry=registry)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class _Collected(Collector):
    """Families that have been collected already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
