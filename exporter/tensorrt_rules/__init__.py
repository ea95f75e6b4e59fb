"""Which forms of an ONNX graph TensorRT computes rightly.

TensorRT's parser refuses some forms of an operator, takes others and computes something else than
the operator says, and leaves a third kind to the builder, which fails late. Graphs are held against
these rules when they are written. Found with the parser and the builder of TensorRT-RTX 1.7, which
share their code with TensorRT's. Source: NVIDIA TensorRT, operator support of the ONNX parser.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from trtllm_lite.exporter.tensorrt_rules.attention import ATTENTION_RULES
from trtllm_lite.exporter.tensorrt_rules.cache import CACHE_RULES
from trtllm_lite.exporter.tensorrt_rules.operators import OPERATOR_RULES
from trtllm_lite.exporter.tensorrt_rules.weights import WEIGHT_RULES
from trtllm_lite.runtime.errors import UnsupportedError

Rule = Callable[[ir.Model], Iterator[str]]
RULES: Mapping[str, Rule] = {**OPERATOR_RULES, **ATTENTION_RULES, **CACHE_RULES, **WEIGHT_RULES}


@dataclass(frozen=True)
class Violation:
    """A rule by its name, and what in the graph breaks it."""

    rule: str
    text: str


def violations(model: ir.Model) -> tuple[Violation, ...]:
    """All that TensorRT would refuse or compute wrongly, in the order of the rules."""
    return tuple(Violation(name, text) for name, rule in RULES.items() for text in rule(model))


def check_graph(path: Path) -> None:
    """Raise UnsupportedError naming the first violation in an ONNX file; its weights are not
    read."""
    check_model(ir.load(path), path.name)


def check_model(model: ir.Model, name: str = "") -> None:
    """`check_graph` of a graph whose weights need no data; `name` is its own by default."""
    for found in violations(model):
        where = name or str(model.graph.name)
        raise UnsupportedError(
            f"a form that TensorRT does not compute ({where}, {found.rule}: {found.text})",
            "models whose graphs need none",
            "export with --target cpu",
        )
