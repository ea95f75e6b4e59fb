"""Values of a graph that depend on nothing but the positions of the tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxruntime as ort

from trtllm_lite.exporter.passes.edit import constant, dims

Array = npt.NDArray[Any]


def by_position(model: ir.Model, values: Sequence[ir.Value], length: int) -> list[Array] | None:
    """What the graph computes for `values` at positions 0 to length - 1 of one row; None when a
    value needs more than positions."""
    positions = _positions(model.graph)
    if positions is None or not _need_only(values, positions):
        return None
    part = _cut(model, values, positions)
    feeds = {str(v.name): _example(v, positions, length) for v in part.graph.inputs}
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        ir.to_proto(part).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run([str(v.name) for v in values], feeds))


def _positions(graph: ir.Graph) -> ir.Value | None:
    """[batch, seq] int64: a row's past length and on, clamped to its last token."""
    for node in graph:
        if node.op_type == "Min" and dims(node.outputs[0]) == ("batch", "seq"):
            return node.outputs[0]
    return None


def _need_only(values: Sequence[ir.Value], positions: ir.Value) -> bool:
    """True when the values are made from positions, constants and the shapes of inputs."""
    waiting, seen = list(values), {positions}
    while waiting:
        value = waiting.pop()
        if value in seen or constant(value) is not None:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            return False
        if node.op_type != "Shape" or not _is_input(node.inputs[0]):
            waiting += [v for v in node.inputs if v is not None]
    return True


def _is_input(value: ir.Value | None) -> bool:
    return value is not None and value.is_graph_input()


def _cut(model: ir.Model, values: Sequence[ir.Value], positions: ir.Value) -> ir.Model:
    """A copy of the graph with those outputs, in which positions are an input."""
    part = model.clone()
    made = {str(v.name): v for node in part.graph for v in node.outputs}
    given = ir.Value(name="given.positions", shape=positions.shape, type=positions.type)
    ir.convenience.replace_all_uses_with(made[str(positions.name)], given)
    part.graph.outputs.clear()
    part.graph.outputs.extend(made[str(v.name)] for v in values)
    common.RemoveUnusedNodesPass()(part)
    for name in [n for n, v in part.graph.initializers.items() if not v.uses()]:
        del part.graph.initializers[name]
    for value in [v for v in part.graph.inputs if not v.uses()]:
        part.graph.inputs.remove(value)
    if given.uses():
        part.graph.inputs.append(given)
    return part


def _example(value: ir.Value, positions: ir.Value, length: int) -> Array:
    """Input of one row of `length` tokens."""
    if value.name == "given.positions":
        return np.arange(length, dtype=np.int64)[None]
    assert value.dtype is not None
    sizes = [{"batch": 1, "seq": length}[str(d)] for d in dims(value) or ()]
    return np.zeros(sizes, value.dtype.numpy())
