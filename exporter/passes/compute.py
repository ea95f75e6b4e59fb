"""A float32 graph -> the same graph in half precision."""

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import constant, make, take_over
from trtllm_lite.runtime.errors import UnsupportedError

LOGITS = "logits"
DTYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
# They turn positions into angles, which half precision cannot do.
ANGLES = frozenset({"Sin", "Cos"})


def compute_in(model: ir.Model, dtype: str) -> int:
    """Let every float32 value be of another type: inputs, weights, caches, what nodes make; only
    the logits are float32 in the end. Returns the number of values.

    Norms add up in float32 all the same (`stash_type` of ai.onnx RMSNormalization and
    LayerNormalization). Raises UnsupportedError where that is no way to compute the model: a
    rotation that is not in a table, a constant that the type cannot hold.
    """
    kind, graph = DTYPES[dtype], model.graph
    angles = [node for node in graph if node.op_type in ANGLES]
    if angles:
        raise UnsupportedError(
            f"a rotary embedding whose angles are computed in the graph, in {dtype}",
            "angles that depend on the position, or on it and the row's length",
            "export with --dtype float32",
        )
    values = [value for value in _all_values(graph) if value.dtype == ir.DataType.FLOAT]
    for value in values:
        _retype(value, kind, dtype)
    for node in graph:
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", kind)
    _cast_logits(graph)
    return len(values)


def _all_values(graph: ir.Graph) -> Iterable[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _retype(value: ir.Value, kind: ir.DataType, dtype: str) -> None:
    numbers = constant(value)
    if numbers is not None:
        with np.errstate(over="ignore"):
            fewer = numbers.astype(kind.numpy())
        if not np.array_equal(np.isfinite(fewer), np.isfinite(numbers)):
            raise UnsupportedError(
                f"a constant beyond the range of {dtype} ({value.name})",
                "constants within it",
                "export with --dtype bfloat16 or float32",
            )
        value.const_value = ir.tensor(fewer, dtype=kind, name=value.name)
    value.type = ir.TensorType(kind)


def _cast_logits(graph: ir.Graph) -> None:
    output = next(value for value in graph.outputs if value.name == LOGITS)
    node = output.producer()
    assert node is not None
    cast = make(node, "Cast", [None], {"to": ir.DataType.FLOAT})
    graph.remove(cast)
    graph.insert_after(node, cast)
    narrow = output.type
    take_over(output, cast.outputs[0])
    output.name, output.type, output.shape = f"{LOGITS}.half", narrow, cast.outputs[0].shape
    cast.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    cast.replace_input_with(0, output)
