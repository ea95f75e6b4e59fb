"""A float16 graph as one that ONNX Runtime computes in float32 on a CPU: exactly, or rounded to
float16 wherever a GPU would keep a float16 value."""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
# Attributes that say what type comes out.
TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "stash_type")


def in_float32(model: ir.Model, *, rounded: bool = False) -> ir.Model:
    """A copy in which float16 values are float32. Weights stay as they are stored and are cast
    where they are read, so that values keep their names.

    rounded: each value that was float16 is rounded to it after it is made, and becomes infinite
    beyond its range; what is inside of an operator is not. A GPU's sums of products are float32 as
    well.
    """
    work = model.clone()
    graph = work.graph
    made = [v for node in graph for v in node.outputs if v.dtype == HALF]
    for value in graph.inputs:
        _widen(value)
    for node in list(graph):
        _retype(node)
    for value in made:
        _widen(value)
        if rounded and value.producer() is not None:
            _round(graph, value)
    for name, value in list(graph.initializers.items()):
        if value.dtype == HALF and value.uses():
            _cast_weight(graph, name, value)
    return work


def _widen(value: ir.Value) -> None:
    if value.dtype == HALF:
        value.type = ir.TensorType(FLOAT)


def _retype(node: ir.Node) -> None:
    if node.op_type == "MatMulNBits":
        # The CPU kernel of other levels takes no scales that a node makes.
        node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    for name in TYPE_ATTRIBUTES:
        if name in node.attributes and node.attributes.get_int(name, 0) == HALF:
            node.attributes[name] = ir.AttrInt64(name, FLOAT)
    for attribute in list(_half_tensors(node)):
        numbers = attribute.as_tensor().numpy().astype(np.float32)
        node.attributes[attribute.name] = ir.AttrTensor(attribute.name, ir.tensor(numbers))


def _half_tensors(node: ir.Node) -> Iterator[ir.Attr]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == HALF:
            yield attribute


def _round(graph: ir.Graph, value: ir.Value) -> None:
    """value -> Cast to float16 -> Cast to float32, which takes the value's name and readers."""
    node = value.producer()
    assert node is not None
    down = ir.node("Cast", [value], {"to": HALF})
    up = ir.node("Cast", [down.outputs[0]], {"to": FLOAT})
    up.outputs[0].type, up.outputs[0].shape = value.type, value.shape
    ir.convenience.replace_all_uses_with(value, up.outputs[0], replace_graph_outputs=True)
    down.replace_input_with(0, value)
    name = value.name
    value.name, up.outputs[0].name = f"{name}.exact", name
    graph.insert_after(node, [down, up])


def _cast_weight(graph: ir.Graph, name: str, value: ir.Value) -> None:
    stored = ir.Value(name=name, shape=value.shape, type=ir.TensorType(HALF))
    stored.const_value = value.const_value
    # Taken out first: the container follows the names of what it holds.
    del graph.initializers[name]
    value.name, value.const_value = f"{name}.float32", None
    value.type = ir.TensorType(FLOAT)
    cast = ir.node("Cast", [stored], {"to": FLOAT}, outputs=[value])
    graph.initializers[name] = stored
    # Just before it is read, so that a run in this order holds few weights in float32.
    readers = set(value.consumers())
    graph.insert_before(next(node for node in graph if node in readers), cast)
