"""The engines' numbers as Prometheus families, with the model's name as a label."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from trtllm_lite.runtime.engine import EngineStats
from trtllm_lite.runtime.step_tally import StepTally, Tally
from trtllm_lite.runtime.step_timer import StepTimer

PREFIX = "trtllm_lite_"
MODEL = "model_name"
"""The label that every number of a model has, as in vLLM."""

Number = Callable[[EngineStats], float]

_GAUGES: tuple[tuple[str, str, Number], ...] = (
    ("requests_waiting", "Sequences that wait for a slot: the queue.", lambda s: s.waiting),
    ("requests_running", "Sequences that have a slot.", lambda s: s.running),
    ("kv_slots_used", "KV cache slots in use.", lambda s: s.slots_used),
    ("kv_slots_total", "KV cache slots.", lambda s: s.slots_total),
    ("kv_tokens_used", "Tokens in the KV cache of running sequences.", lambda s: s.kv_tokens_used),
    (
        "kv_tokens_total",
        "Tokens that all running sequences may hold together.",
        lambda s: s.kv_tokens_total,
    ),
    (
        "kv_cache_usage_ratio",
        "Of the tokens that running sequences may hold, the part that they do; 1 is all.",
        lambda s: s.kv_tokens_used / s.kv_tokens_total,
    ),
    (
        "prefix_store_blocks",
        "Blocks of prefixes kept for reuse.",
        lambda s: s.prefix_store_blocks,
    ),
    ("prefix_store_bytes", "Bytes of prefixes kept for reuse.", lambda s: s.prefix_store_bytes),
)
_COUNTERS: tuple[tuple[str, str, Number], ...] = (
    (
        "prompt_tokens",
        "Prompt tokens of requests that got a slot, those from kept prefixes included.",
        lambda s: s.prompt_tokens,
    ),
    ("generation_tokens", "Tokens made.", lambda s: s.generation_tokens),
    (
        "prefix_query_tokens",
        "Tokens for which kept prefixes were looked up.",
        lambda s: s.prefix_query_tokens,
    ),
    ("prefix_hit_tokens", "Tokens taken from kept prefixes.", lambda s: s.prefix_hit_tokens),
    ("preemptions", "Times that a sequence lost its slot to others.", lambda s: s.preemptions),
    ("steps", "Engine steps.", lambda s: s.steps),
    ("draft_tokens", "Tokens guessed and checked.", lambda s: s.draft_tokens),
    ("accepted_draft_tokens", "Guessed tokens that were right.", lambda s: s.accepted_tokens),
)


class Watched(Protocol):
    """The part of `AsyncLLM` that is looked at."""

    def last_stats(self) -> EngineStats:
        """The numbers after the last step or command. Waits for nothing."""

    def time_steps(self, timer: StepTimer) -> object:
        """Report every step to `timer`."""


@dataclass(frozen=True)
class _Source:
    llm: Watched
    steps: StepTally


class EngineCollector(Collector):
    """Looks at each engine once a collection, without waiting for it or waking it."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}

    def watch(self, model: str, llm: Watched) -> None:
        """Show this engine under that name from now on. Raises EngineDeadError."""
        steps = StepTally()
        llm.time_steps(steps)
        self._sources[model] = _Source(llm, steps)

    def collect(self) -> Iterator[Metric]:
        looks = {model: source.llm.last_stats() for model, source in self._sources.items()}
        for name, text, number in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=(MODEL,))
            for model, stats in looks.items():
                gauge.add_metric((model,), number(stats))
            yield gauge
        for name, text, number in _COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=(MODEL,))
            for model, stats in looks.items():
                counter.add_metric((model,), number(stats))
            yield counter
        yield _finished(looks)
        yield self._steps()
        yield self._gaps()

    def _steps(self) -> Metric:
        text = "Time of a step, by what it ran; delivery of its results included."
        family = HistogramMetricFamily(PREFIX + "step_seconds", text, labels=(MODEL, "phase"))
        for model, source in self._sources.items():
            for phase, tally in source.steps.phases.items():
                family.add_metric((model, phase), _buckets(tally), tally.sum)
        return family

    def _gaps(self) -> Metric:
        text = "Time from one token of a sequence to the next, or to those of its next step."
        name = PREFIX + "inter_token_latency_seconds"
        family = HistogramMetricFamily(name, text, labels=(MODEL,))
        for model, source in self._sources.items():
            family.add_metric((model,), _buckets(source.steps.gaps), source.steps.gaps.sum)
        return family


def _finished(looks: dict[str, EngineStats]) -> Metric:
    text = "Choices that have ended."
    family = CounterMetricFamily(PREFIX + "choices_finished", text, labels=(MODEL, "reason"))
    for model, stats in looks.items():
        for reason, count in sorted(stats.finished.items()):
            family.add_metric((model, reason), count)
    return family


def _buckets(tally: Tally) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them: so the last one is the count, whatever is added."""
    ends = (*tally.bounds, float("inf"))
    return list(zip(map(floatToGoString, ends), accumulate(tally.counts()), strict=True))
