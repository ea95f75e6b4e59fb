"""Rules about element types and quantized weights."""

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims

QUANTIZED = (ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN)
TYPES = frozenset(
    {
        *(ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.BOOL),
        *(ir.DataType.INT32, ir.DataType.INT64, *QUANTIZED),
    }
)
WEIGHT, SCALE, ZERO = range(3)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph if node.op_type == "DequantizeLinear")


def _types(model: ir.Model) -> Iterator[str]:
    """Of what a graph is given, and of what its nodes make where that is known."""
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        if value.dtype not in TYPES:
            yield f"{value.name} of type {value.dtype}"
    for node in model.graph:
        made = {value.dtype for value in node.outputs if value.dtype is not None}
        if node.op_type == "Cast":
            made = {ir.DataType(node.attributes.get_int("to"))}
        for kind in sorted(made - TYPES):
            yield f"{node.outputs[0].name} of type {kind}, made by {node.op_type}"


def _zero_point(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if len(node.inputs) > ZERO and node.inputs[ZERO] is not None:
            yield f"a zero point of {_name(node)}; weights are symmetric"


def _quantized(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        weight = node.inputs[WEIGHT]
        if weight is None or weight.dtype not in QUANTIZED or not weight.is_initializer():
            yield f"{_name(node)} dequantized; it is an initializer of int8, int4 or float8e4m3fn"


def _blocks(model: ir.Model) -> Iterator[str]:
    """[K, N] with a scale for each block along K and each column: the last block is a whole one."""
    for node in _nodes(model):
        axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
        size, scales = (dims(node.inputs[i]) for i in (WEIGHT, SCALE))
        whole = size is not None and len(size) == 2 and axis == 0 and block > 0
        if not whole or size is None or scales != (int(size[0]) // max(1, block), size[1]):
            yield f"{_name(node)} {size} in blocks of {block} along axis {axis}, scales {scales}"
        elif int(size[0]) % block:
            yield f"{_name(node)}: blocks of {block} do not divide {size[0]}"


def _name(node: ir.Node) -> str:
    weight = node.inputs[WEIGHT]
    return str(weight.name if weight is not None else None)


WEIGHT_RULES: Mapping[str, Callable[[ir.Model], Iterator[str]]] = {
    "element_type": _types,
    "zero_point": _zero_point,
    "quantized_weight": _quantized,
    "weight_blocks": _blocks,
}
