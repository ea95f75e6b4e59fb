"""The numbers of all replicas in one exposition."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from trtllm_lite.runtime.server.engine_metrics import PREFIX

LABEL = "replica"


def merged(texts: Mapping[str, bytes]) -> bytes:
    """One exposition of several: each sample gets the name it came under as its label `replica`."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text.decode("utf-8")):
            made = Metric(family.name, family.documentation, family.type)
            into = families.setdefault(family.name, made)
            for sample in family.samples:
                labels = {**sample.labels, LABEL: name}
                into.add_sample(sample.name, labels, sample.value, sample.timestamp)
    registry = CollectorRegistry()
    registry.register(_Kept(families))
    return generate_latest(registry)


class FrontMetrics:
    """What only the front knows, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._running = Gauge(
            f"{PREFIX}replicas_running", "Replicas that take requests.", registry=self._registry
        )
        self._lost = Counter(
            f"{PREFIX}replica_requests_lost",
            "Requests whose replica died: run again elsewhere, or ended with an error.",
            registry=self._registry,
        )

    def running(self, count: int) -> None:
        """So many replicas take requests now."""
        self._running.set(count)

    def lost(self) -> None:
        """A request's replica has died."""
        self._lost.inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)


class _Kept(Collector):
    """Families that are there already."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()
