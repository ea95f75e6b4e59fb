"""A graph in float16 or bfloat16 as one that ONNX Runtime computes in float32 on a CPU: exactly, or
rounded wherever a GPU would keep a value of that type."""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.rounded.rotary import unfold_rotary

HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
# Attributes that say what type comes out.
TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "stash_type")
# What comes out is among what went in, so that it is rounded already.
EXACT = frozenset(
    {"Gather", "GatherND", "GatherElements", "Reshape", "Transpose", "Identity", "Split", "Slice"}
    | {
        "Concat",
        "Expand",
        "Squeeze",
        "Unsqueeze",
        "TensorScatter",
        "Where",
        "Max",
        "Min",
        "Clip",
        "Relu",
    }
)
# K and V as they were given, behind what was in the cache; they are updated in place.
CACHES = {"GroupQueryAttention": slice(1, 3)}


def in_float32(model: ir.Model, kind: ir.DataType = HALF, *, rounded: bool = False) -> ir.Model:
    """A copy in which values of type `kind`, float16 or bfloat16, are float32. Weights stay as they
    are stored and are cast where they are read, so that values keep their names.

    rounded: each value that was of that type is rounded to it after it is made, to the nearest and
    of two to the even one, and becomes infinite beyond its range; what is inside of an operator is
    not, as a GPU's sums of products are float32 as well. An attention's rotation becomes a node of
    its own, since kernels keep rotated queries and keys in that type.
    """
    work = model.clone()
    graph = work.graph
    if rounded:
        unfold_rotary(work)
    made = [v for node in graph for v in node.outputs if v.dtype == kind]
    for value in graph.inputs:
        _widen(value, kind)
    for node in list(graph):
        _retype(node, kind)
    for value in made:
        _widen(value, kind)
        if rounded and not _is_exact(value):
            _round(graph, value, kind)
    for name, value in list(graph.initializers.items()):
        if value.dtype == kind and value.uses():
            _cast_weight(graph, name, value)
    return work


def _widen(value: ir.Value, kind: ir.DataType) -> None:
    if value.dtype == kind:
        value.type = ir.TensorType(FLOAT)


def _is_exact(value: ir.Value) -> bool:
    node = value.producer()
    assert node is not None
    caches = node.outputs[CACHES.get(node.op_type, slice(0))]
    return node.op_type in EXACT or any(value is cache for cache in caches)


def _retype(node: ir.Node, kind: ir.DataType) -> None:
    if node.op_type == "MatMulNBits":
        # The CPU kernel of other levels takes no scales that a node makes.
        node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    for name in TYPE_ATTRIBUTES:
        if name in node.attributes and node.attributes.get_int(name, 0) == kind:
            node.attributes[name] = ir.AttrInt64(name, FLOAT)
    for attribute in list(_narrow_tensors(node, kind)):
        numbers = attribute.as_tensor().numpy().astype(np.float32)
        node.attributes[attribute.name] = ir.AttrTensor(attribute.name, ir.tensor(numbers))


def _narrow_tensors(node: ir.Node, kind: ir.DataType) -> Iterator[ir.Attr]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == kind:
            yield attribute


def _round(graph: ir.Graph, value: ir.Value, kind: ir.DataType) -> None:
    """value -> Cast to `kind` -> Cast to float32, which takes the value's name and readers."""
    node = value.producer()
    assert node is not None
    down = ir.node("Cast", [value], {"to": kind})
    up = ir.node("Cast", [down.outputs[0]], {"to": FLOAT})
    for cast in (down, up):
        cast.metadata_props.update(node.metadata_props)
    up.outputs[0].type, up.outputs[0].shape = value.type, value.shape
    ir.convenience.replace_all_uses_with(value, up.outputs[0], replace_graph_outputs=True)
    down.replace_input_with(0, value)
    name = value.name
    value.name, up.outputs[0].name = f"{name}.exact", name
    graph.insert_after(node, [down, up])


def _cast_weight(graph: ir.Graph, name: str, value: ir.Value) -> None:
    stored = ir.Value(name=name, shape=value.shape, type=ir.TensorType(value.dtype or FLOAT))
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
