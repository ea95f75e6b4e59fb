"""The server's numbers for Prometheus, in a registry of their own. Reading them changes nothing."""

from collections.abc import Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtllm_lite.runtime.engine import EngineStats
from trtllm_lite.runtime.outputs import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "trtllm_lite_"

Outcome = Literal["finished", "aborted", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("finished", "aborted", "failed")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKEN_BUCKETS = _SHORT
_TIME_BUCKETS = (*_SHORT, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_GAUGES = (
    ("requests_waiting", "Sequences that wait for a slot.", "waiting"),
    ("requests_running", "Sequences that have a slot.", "running"),
    ("kv_slots_used", "KV cache slots in use.", "slots_used"),
    ("kv_slots_total", "KV cache slots.", "slots_total"),
    ("kv_tokens_used", "Tokens in the KV cache of running sequences.", "kv_tokens_used"),
    ("kv_tokens_total", "Tokens that all running sequences may hold together.", "kv_tokens_total"),
    ("prefix_store_bytes", "Bytes of prefixes kept for reuse.", "prefix_store_bytes"),
)
_COUNTERS = (
    ("prefix_hit_tokens", "Prompt tokens taken from kept prefixes.", "prefix_hit_tokens"),
    ("preemptions", "Times that a sequence lost its slot to others.", "preemptions"),
    ("steps", "Engine steps.", "steps"),
    ("draft_tokens", "Tokens guessed and checked.", "draft_tokens"),
    ("accepted_draft_tokens", "Guessed tokens that were right.", "accepted_tokens"),
)


class Metrics:
    """Counts what happens to requests. Invariant: `accepted` is the sum of the three outcomes and
    of the requests that are on their way."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineNumbers()
        self.registry.register(self._engine)
        self._accepted = self._counter("requests_accepted", "Requests given to the engine.")
        self._outcomes = {
            "finished": self._counter("requests_finished", "Requests answered to their end."),
            "aborted": self._counter("requests_aborted", "Requests whose client left."),
            "failed": self._counter("requests_failed", "Requests that ended with an error."),
        }
        self._rejected = self._counter("requests_rejected", "Requests not accepted.", "reason")
        self._ended = self._counter("choices_finished", "Choices that have ended.", "reason")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._generated = self._counter("generation_tokens", "Tokens made for ended requests.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._tpot = self._histogram(
            "inter_token_latency_seconds", "Mean time per token after the first.", _TOKEN_BUCKETS
        )
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first slot.")
        self._total = self._histogram("e2e_request_latency_seconds", "Arrival to last token.")

    def accepted(self) -> None:
        """A request is the engine's now."""
        self._accepted.inc()

    def ended(self, outcome: Outcome) -> None:
        """An accepted request has ended, and how."""
        self._outcomes[outcome].inc()

    def rejected(self, reason: str) -> None:
        """A request was not accepted. Reasons are names from the code, never text of clients."""
        self._rejected.labels(reason).inc()

    def observe(self, output: RequestOutput) -> None:
        """The times and tokens of one prompt that has run to its end."""
        self._prompt.inc(len(output.prompt_token_ids))
        for choice in output.outputs:
            self._generated.inc(len(choice.token_ids))
            self._ended.labels(choice.finish_reason or "abort").inc()
        times = output.metrics
        total = None
        if times.finished_time is not None:
            total = times.finished_time - times.arrival_time
        pairs = (
            (self._ttft, times.ttft),
            (self._tpot, times.tpot),
            (self._queue, times.queue_time),
            (self._total, total),
        )
        for histogram, value in pairs:
            if value is not None:
                histogram.observe(value)

    def text(self, stats: EngineStats | None) -> bytes:
        """The exposition, with the engine's numbers as `stats` has them; None: as last time."""
        if stats is not None:
            self._engine.stats = stats
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = _TIME_BUCKETS
    ) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=buckets)


class _EngineNumbers(Collector):
    """One look at the engine; nothing before the first."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(PREFIX + name, text, value=getattr(self.stats, field))
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(self.stats, field))
