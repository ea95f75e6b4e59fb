"""Linear layers: one product a layer, and one product for layers that read the same input."""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common

from trtllm_lite.exporter.passes.edit import (
    MICROSOFT,
    dims,
    int64s,
    make,
    only_reader,
    remove_dead,
    replace,
    take_over,
)
from trtllm_lite.exporter.passes.weights import (
    arrange_weight,
    is_single,
    pack_weights,
    weight_parts,
)


def fuse_linear(model: ir.Model) -> int:
    """MatMul(x, Transpose(weight)) -> FusedMatMul(x, weight, transB=1), named as its weight.

    The weight stays in the checkpoint's layout, so that it can be streamed to disk unchanged and a
    tied embedding is one tensor; ONNX Runtime packs it when a session is created.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "MatMul" or (weight := _transposed_weight(node)) is None:
            continue
        fused = replace(node, "FusedMatMul", [node.inputs[0], weight], {"transB": 1}, MICROSOFT)
        fused.name = weight.name
        count += 1
    common.RemoveUnusedNodesPass()(model)
    return count


def turn_weights(model: ir.Model) -> int:
    """MatMul(x, weight [in, out]) -> FusedMatMul(x, weight [out, in], transB=1), as other layers
    are: the parameter is turned on its way to disk. A weight that something else reads stays.
    """
    count = 0
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or not _is_own(weight, 2) or not is_single(weight):
            continue
        rows, columns = (int(d) for d in dims(weight) or ())
        arrange_weight(weight, (rows, columns), (1, 0), (columns, rows))
        fused = replace(node, "FusedMatMul", [node.inputs[0], weight], {"transB": 1}, MICROSOFT)
        fused.name = weight.name
        count += 1
    return count


def pack_projections(model: ir.Model) -> int:
    """Linear layers of one module that read one value -> one product with their weights stacked,
    and a Split.

    Returns the number of packed products. Biases are stacked too; layers with and without a bias
    are packed apart. Weights that something else reads stay as they are. Where attention and
    feed-forward part read one norm, each is packed for itself: what follows either of them takes a
    product as a whole.
    """
    groups: dict[tuple[ir.Value, str, bool], list[Linear]] = {}
    for linear in linears(model.graph):
        key = linear.source, linear.module, linear.bias is not None
        groups.setdefault(key, []).append(linear)
    packed = [group for group in groups.values() if len(group) > 1]
    for group in packed:
        _pack(model.graph, group)
    return len(packed)


@dataclass(frozen=True)
class Linear:
    """One product with a weight [out, in] that nothing else reads, with the addition of its bias if
    there is one."""

    source: ir.Value
    node: ir.Node
    weight: ir.Value
    bias: ir.Value | None
    add: ir.Node | None

    @property
    def output(self) -> ir.Value:
        return (self.add or self.node).outputs[0]

    @property
    def module(self) -> str:
        """The name of the module that has the layer."""
        return weight_parts(self.weight)[0].rpartition(".")[0].rpartition(".")[0]

    @property
    def is_single(self) -> bool:
        """Whether weight and bias are one parameter each, in the order of its elements."""
        return is_single(self.weight) and (self.bias is None or is_single(self.bias))

    def regroup(self, heads: int, parts: int, dim: int) -> None:
        """Rows [heads, parts, dim] -> [parts, heads, dim]; `is_single` has to be true."""
        for value in (self.weight, self.bias):
            if value is not None:
                size = tuple(int(d) for d in dims(value) or ())
                rest = size[1:]
                perm = (1, 0, *range(2, 3 + len(rest)))
                arrange_weight(value, (heads, parts, dim, *rest), perm, size)


def linears(graph: ir.Graph) -> Iterator[Linear]:
    """Those of a graph, in its order."""
    for node in graph:
        if node.op_type != "FusedMatMul":
            continue
        source, weight = node.inputs
        if source is None or weight is None or not _is_own(weight, 2):
            continue
        yield Linear(source, node, weight, *_bias(node, weight))


def _bias(node: ir.Node, weight: ir.Value) -> tuple[ir.Value | None, ir.Node | None]:
    """The bias that is added to a product, [rows of the weight], and the node that adds it."""
    add = only_reader(node.outputs[0], "Add")
    if add is None or weight.shape is None:
        return None, None
    bias = next((v for v in add.inputs if v is not None and _is_own(v, 1)), None)
    return (bias, add) if bias is not None and dims(bias) == (weight.shape[0],) else (None, None)


def _is_own(value: ir.Value, rank: int) -> bool:
    """A weight without data that is read once."""
    absent = value.is_initializer() and value.const_value is None
    return absent and value.shape is not None and len(value.shape) == rank and _reads(value) == 1


def _reads(value: ir.Value) -> int:
    return len(list(value.uses()))


def _pack(graph: ir.Graph, group: list[Linear]) -> None:
    first, name = group[0].node, group[0].weight.name
    weight = pack_weights(graph, [linear.weight for linear in group])
    product = make(first, "FusedMatMul", [first.inputs[0], weight], {"transB": 1}, MICROSOFT)
    product.name = name
    last = product
    _describe(product.outputs[0], group, f"{name}.packed")
    biases = [linear.bias for linear in group if linear.bias is not None]
    if biases:
        last = make(first, "Add", [product.outputs[0], pack_weights(graph, biases)])
        _describe(last.outputs[0], group, f"{biases[0].name}.packed")
    sizes = int64s(graph, [_width(linear) for linear in group])
    split = make(first, "Split", [last.outputs[0], sizes], {"axis": -1}, num_outputs=len(group))
    for linear, part in zip(group, split.outputs, strict=True):
        take_over(linear.output, part)
        remove_dead([linear.add or linear.node])


def _describe(value: ir.Value, group: list[Linear], name: str) -> None:
    """Name, type and shape of a packed product."""
    one = group[0].node.outputs[0]
    value.name, value.type = name, one.type
    if one.shape is not None:
        value.shape = ir.Shape([*one.shape[:-1], sum(_width(linear) for linear in group)])


def _width(linear: Linear) -> int:
    assert linear.weight.shape is not None
    return int(linear.weight.shape.numpy()[0])


def _transposed_weight(node: ir.Node) -> ir.Value | None:
    """The 2-D weight behind the second input, when that is its transpose."""
    value = node.inputs[1]
    transpose = value.producer() if value is not None else None
    if transpose is None or transpose.op_type != "Transpose":
        return None
    weight = transpose.inputs[0]
    perm = transpose.attributes.get("perm")
    swapped = perm is not None and list(perm.as_ints()) == [1, 0]
    return weight if weight is not None and weight.is_initializer() and swapped else None
