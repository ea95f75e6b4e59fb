"""Lengths and positions, so that no node needs a value of the device in host memory."""

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import (
    dims,
    graph_of,
    initializer,
    int64s,
    integers,
    make,
    producer,
    remove_dead,
    take_over,
)
from trtllm_lite.runtime.errors import UnsupportedError

LONGEST, QUERY_LENS = 6, 16
INPUT_IDS, MAX_TOTAL_LEN = "input_ids", "max_total_len"
LOGITS, TOP_LOGITS, TOP_IDS = "logits", "top_logits", "top_ids"
INT64 = ir.DataType.INT64


def take_longest(model: ir.Model) -> int:
    """GroupQueryAttention takes the longest total length from a new graph input, `max_total_len`
    int32 [1], and no lengths of queries. Returns the number of attention nodes."""
    nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    if not nodes:
        return 0
    given = ir.Value(name=MAX_TOTAL_LEN, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT32))
    at = next(i for i, v in enumerate(model.graph.inputs) if str(v.name).startswith("past_key"))
    model.graph.inputs.insert(at, given)
    for node in nodes:
        computed = node.inputs[LONGEST]
        node.replace_input_with(LONGEST, given)
        _cut(node)
        maker = computed.producer() if computed is not None else None
        if maker is not None:
            remove_dead([maker])
    return len(nodes)


def _cut(node: ir.Node) -> None:
    """Without the lengths of queries, and without the empty inputs before them."""
    last = max(i for i, v in enumerate(node.inputs[:QUERY_LENS]) if v is not None)
    for index in range(last + 1, len(node.inputs)):
        node.replace_input_with(index, None)
    node.resize_inputs(last + 1)


def count_on_device(model: ir.Model) -> int:
    """The positions 0, 1, .. of the tokens as a running sum of ones, not as a Range whose end is a
    shape. Returns the number of Ranges, 0 or 1."""
    count = 0
    for node in list(model.graph):
        if node.op_type == "Unsqueeze" and (steps := _steps(node)) is not None:
            _sum_of_ones(node, steps)
            count += 1
    return count


def give_largest(model: ir.Model, count: int) -> int:
    """The `count` largest logits as two more outputs behind the logits: `top_logits` float32 and
    `top_ids` int64, [batch, num_logits, count]. Raises UnsupportedError when there are fewer."""
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == LOGITS)
    shape = dims(logits)
    if shape is None or int(shape[-1]) < count:
        raise UnsupportedError(
            f"a vocabulary of fewer than {count} tokens on CUDA",
            "larger ones",
            "export with --target cpu",
        )
    attributes = {"axis": -1, "largest": 1, "sorted": 1}
    node = ir.node("TopK", [logits, int64s(graph, [count])], attributes, num_outputs=2)
    graph.append(node)
    named = (TOP_LOGITS, ir.DataType.FLOAT), (TOP_IDS, INT64)
    for value, (name, kind) in zip(node.outputs, named, strict=True):
        value.name, value.type = name, ir.TensorType(kind)
        value.shape = ir.Shape([*shape[:-1], count])
    at = list(graph.outputs).index(logits) + 1
    graph.outputs.insert(at, node.outputs[0])
    graph.outputs.insert(at + 1, node.outputs[1])
    return 1


def _steps(unsqueeze: ir.Node) -> ir.Value | None:
    """`input_ids`, when the node gives its token numbers, [1, seq]."""
    span = producer(unsqueeze.inputs[0], "Range")
    if span is None or integers(unsqueeze.inputs[1]) != [0]:
        return None
    start, stop, step = span.inputs
    end = producer(stop, "Squeeze")
    shape = producer(end.inputs[0], "Shape") if end is not None else None
    if shape is None or (integers(start), integers(step)) != ([0], [1]):
        return None
    bounds = shape.attributes.get_int("start", 0), shape.attributes.get_int("end", 0)
    source = shape.inputs[0]
    if bounds != (1, 2) or source is None or not source.is_graph_input():
        return None
    return source if source.name == INPUT_IDS else None


def _sum_of_ones(unsqueeze: ir.Node, ids: ir.Value) -> None:
    graph = graph_of(unsqueeze)
    zero, one = (initializer(graph, f"count.{n}", np.array(n, np.int64)) for n in (0, 1))
    value = ids
    for operator, others in (("Mul", [zero]), ("Add", [one]), ("CumSum", [one]), ("Sub", [one])):
        made = make(unsqueeze, operator, [value, *others]).outputs[0]
        made.name, made.shape, made.type = f"count.{operator}", ids.shape, ids.type
        value = made
    shape = value.shape
    take_over(unsqueeze.outputs[0], value)
    value.shape = shape
    remove_dead([unsqueeze])
