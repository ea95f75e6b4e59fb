"""Small moves on an onnx_ir graph that several passes share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

MICROSOFT = "com.microsoft"

Dims = tuple[int | str, ...]


def replace(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    domain: str = "",
) -> ir.Node:
    """Put a new node with the same output value in the place of `node`, which has one output."""
    new = make(node, op_type, inputs, attributes, domain)
    take_over(node.outputs[0], new.outputs[0])
    graph_of(node).remove(node, safe=True)
    return new


def make(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    domain: str = "",
    num_outputs: int = 1,
) -> ir.Node:
    """A new node just before another, with that one's module names."""
    graph = graph_of(before)
    new = ir.node(op_type, inputs, attributes or {}, domain=domain, num_outputs=num_outputs)
    new.metadata_props.update(before.metadata_props)
    graph.insert_before(before, new)
    if domain == MICROSOFT:
        graph.opset_imports[MICROSOFT] = 1
    return new


def take_over(old: ir.Value, new: ir.Value) -> None:
    """`new` gets the name, shape, type and readers of `old`, also as an output of the graph."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name = None


def remove_dead(nodes: Iterable[ir.Node]) -> None:
    """Remove the nodes whose outputs nobody reads, and then those that only fed them."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.graph is None or any(v.uses() or v.is_graph_output() for v in node.outputs):
            continue
        producers = [v.producer() for v in node.inputs if v is not None]
        graph_of(node).remove(node, safe=True)
        waiting += [p for p in producers if p is not None]


def graph_of(node: ir.Node) -> ir.Graph:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    return graph


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that makes a value, when it is one of these operators."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in op_types else None


def only_reader(value: ir.Value, *op_types: str) -> ir.Node | None:
    """The one node that reads a value, when it is one of these operators and nothing else does."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    return uses[0].node if uses[0].node.op_type in op_types else None


def constant(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """The numbers of an initializer that has its data in the graph."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    return value.const_value.numpy()


def integers(value: ir.Value | None) -> list[int] | None:
    """The integers of a constant, flat."""
    numbers = constant(value)
    if numbers is None or not np.issubdtype(numbers.dtype, np.integer):
        return None
    return [int(n) for n in numbers.reshape(-1)]


def int64s(graph: ir.Graph, numbers: Sequence[int]) -> ir.Value:
    """The initializer of these integers, [n]; made once a graph."""
    return initializer(graph, f"int64_{'_'.join(map(str, numbers))}", np.array(numbers, np.int64))


def initializer(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """An initializer with its data in the graph; the one that is there, if there is one."""
    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        kind = ir.TensorType(tensor.dtype)
        graph.initializers[name] = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=kind, const_value=tensor
        )
    return graph.initializers[name]


def dims(value: ir.Value | None) -> Dims | None:
    """Sizes and names of a value's dimensions; None when any is not known."""
    if value is None or value.shape is None:
        return None
    found = [d if isinstance(d, int) else d.value for d in value.shape.dims]
    return None if None in found else tuple(d for d in found if d is not None)
