"""Fixtures of the passes' tests: small graphs from text, with weights that have no data."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxruntime as ort
import pytest

from trtllm_lite.exporter.passes import external_weights, weight_arrangements, weight_parts

Arrays = dict[str, Any]
HEAD = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'


def _make(text: str, weights: dict[str, tuple[int, ...]] | None = None) -> ir.Model:
    wanted = weights or {}
    inputs = "".join(f", float[{','.join(map(str, s))}] {n}" for n, s in wanted.items())
    made = ir.from_onnx_text(HEAD + text.replace("WEIGHTS", inputs))
    common.ShapeInferencePass()(made)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(made)
    for value in [v for v in made.graph.inputs if v.name in wanted]:
        made.graph.inputs.remove(value)
        made.graph.initializers[str(value.name)] = value
    return made


def _run(made: ir.Model, feeds: Arrays, weights: Arrays | None = None) -> list[Any]:
    copy = made.clone()
    for name, value in external_weights([copy]).items():
        parts = [_arranged(value, part, (weights or {})[part]) for part in weight_parts(value)]
        value.const_value = ir.tensor(np.concatenate(parts), name=name)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        ir.to_proto(copy).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    used = {i.name for i in session.get_inputs()}
    return list(session.run(None, {n: a for n, a in feeds.items() if n in used}))


def _arranged(weight: ir.Value, name: str, numbers: Any) -> Any:
    """A parameter as its weight has it, when the weight is that parameter alone."""
    order = weight_arrangements(weight).get(name)
    if order is None:
        return numbers
    assert weight.shape is not None
    return numbers.reshape(order.shape).transpose(order.perm).reshape(weight.shape.numpy())


@pytest.fixture(scope="session")
def make_graph() -> Callable[..., ir.Model]:
    """(text, weights' shapes) -> a graph whose weights have no data, as the tracer leaves it.

    WEIGHTS in the text is where they stand among the inputs.
    """
    return _make


@pytest.fixture(scope="session")
def run_graph() -> Callable[..., list[Any]]:
    """(graph, inputs, parameters) -> outputs of a copy; packed weights are put together."""
    return _run


@pytest.fixture
def array() -> Callable[..., Any]:
    """float32 normal numbers of a shape, other ones at each call."""
    rng = np.random.default_rng(0)
    return lambda *shape: rng.standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="session")
def ops() -> Callable[[ir.Model], list[str]]:
    """Operators of a graph, in its order."""
    return lambda made: [node.op_type for node in made.graph]
