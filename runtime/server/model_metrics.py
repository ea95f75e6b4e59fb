"""What is told of a model once: where it came from, how it is stored, what was proved of it."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtllm_lite.runtime.server.engine_metrics import MODEL, PREFIX

_FACTS = ("source", "model_type", "target", "dtype")


@dataclass(frozen=True)
class _Model:
    fingerprint: str
    facts: Mapping[str, Any]


class ModelCollector(Collector):
    """Constant numbers: the build, and of each model its facts and its parity certificate."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._models: dict[str, _Model] = {}

    def add(self, model: str, fingerprint: str, facts: Mapping[str, Any]) -> None:
        """`facts`: JSON data about the bundle, whose certificate others have written: what is not
        as it should be is left out."""
        self._models[model] = _Model(fingerprint, facts)

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            PREFIX + "build_info", "What runs here.", labels=("version", "python")
        )
        build.add_metric((self._version, platform.python_version()), 1)
        yield build
        yield self._info()
        yield self._passed()
        yield self._gates("value", "What was measured for a gate of the parity certificate.")
        yield self._gates("limit", "What a gate of the parity certificate allows.")

    def _info(self) -> Metric:
        labels = (MODEL, "fingerprint", *_FACTS, "prefill_format", "decode_format")
        family = GaugeMetricFamily(PREFIX + "model_info", "The bundle.", labels=labels)
        for name, model in self._models.items():
            formats = _mapping(model.facts.get("quantization"))
            told = [_text(model.facts.get(fact)) for fact in _FACTS]
            told += [_text(formats.get(phase)) for phase in ("prefill", "decode")]
            family.add_metric((name, model.fingerprint, *told), 1)
        return family

    def _passed(self) -> Metric:
        text = "Whether the bundle's parity certificate says that all gates passed."
        family = GaugeMetricFamily(PREFIX + "parity_passed", text, labels=(MODEL,))
        for name, model in self._models.items():
            certificate = model.facts.get("parity")
            if isinstance(certificate, Mapping):
                family.add_metric((name,), certificate.get("passed") is True)
        return family

    def _gates(self, field: str, text: str) -> Metric:
        family = GaugeMetricFamily(f"{PREFIX}parity_gate_{field}", text, labels=(MODEL, "gate"))
        for name, model in self._models.items():
            for gate, value in _numbers(model.facts.get("parity"), field).items():
                family.add_metric((name, gate), value)
        return family


def _numbers(certificate: object, field: str) -> dict[str, float]:
    """The gates of a certificate by name, those that have a name and a number."""
    gates = _mapping(certificate).get("gates")
    found: dict[str, float] = {}
    for gate in gates if isinstance(gates, list) else []:
        name, value = _mapping(gate).get("name"), _mapping(gate).get(field)
        if isinstance(name, str) and isinstance(value, int | float):
            found[name] = value
    return found


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return "" if value is None else str(value)
