"""Rules about the KV cache: what TensorRT can update in place.

An engine's cache tensor is an input of the network, is read by nothing but its update, and its
update is an output of the network, which is then bound to the same memory.
"""

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims

CACHE, UPDATE, INDICES = range(3)
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph if node.op_type == "TensorScatter")


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if len(node.inputs) > index else None


def _mode(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        mode = node.attributes.get_string("mode", "linear")
        if mode != "linear":
            yield f"a TensorScatter of mode {mode}"


def _axis(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        axis = node.attributes.get_int("axis", -2)
        if axis != -2:
            yield f"a TensorScatter along axis {axis}; it is -2"


def _rank(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        size = dims(_input(node, CACHE))
        if size is None or len(size) != 4:
            yield f"a cache of shape {size}; it has 4 dimensions"


def _type(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        cache = _input(node, CACHE)
        if cache is None or cache.dtype not in FLOATS:
            yield f"a cache of type {cache.dtype if cache else None}; it is of a float type"


def _source(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        cache = _input(node, CACHE)
        if cache is None or not cache.is_graph_input():
            yield f"a cache {cache.name if cache else None} that is no input of the graph"


def _sink(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if not node.outputs[0].is_graph_output():
            yield f"an updated cache {node.outputs[0].name} that is no output of the graph"


def _readers(model: ir.Model) -> Iterator[str]:
    """Before and after the update it is one piece of memory."""
    for node in _nodes(model):
        cache = _input(node, CACHE)
        others = [u.node for u in cache.uses() if u.node is not node] if cache is not None else []
        for reader in others:
            if reader.op_type != "Shape":
                yield f"{reader.op_type} reads a cache that is written in place"


def _indices(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        indices = _input(node, INDICES)
        if indices is None or indices.dtype != ir.DataType.INT64:
            found = "none" if indices is None else indices.dtype
            yield f"write indices of type {found}; they are int64"


def _pairs(model: ir.Model) -> Iterator[str]:
    """Each past_* has its present_*, and there are no others."""
    made = {str(v.name): v.producer() for v in model.graph.outputs}
    for value in model.graph.inputs:
        name = str(value.name)
        if not name.startswith("past_") or name == "past_lens":
            continue
        node = made.get(name.replace("past_", "present_", 1))
        if node is None or node.op_type != "TensorScatter" or _input(node, CACHE) is not value:
            yield f"{name}, whose update is not the output of that name"


CACHE_RULES: Mapping[str, Callable[[ir.Model], Iterator[str]]] = {
    "cache_mode": _mode,
    "cache_axis": _axis,
    "cache_rank": _rank,
    "cache_type": _type,
    "cache_source": _source,
    "cache_sink": _sink,
    "cache_readers": _readers,
    "cache_indices": _indices,
    "cache_pairs": _pairs,
}
