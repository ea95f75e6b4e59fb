"""Stretches of a graph that see all tokens in one row, [tokens, hidden], made [batch, seq, hidden].

That is what some modelling code does around its feed-forward layers. It hides products from the
passes that follow, and additions from the norms that they belong to.
"""

from collections.abc import Iterator

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import (
    MICROSOFT,
    dims,
    graph_of,
    make,
    remove_dead,
    take_over,
)

NORMS = ("LayerNormalization", "RMSNormalization")
POINTWISE = frozenset({"Add", "Gelu", "Mul", "Pow", "QuickGelu", "Relu", "Sigmoid", "Tanh"})


def widen_rows(model: ir.Model) -> int:
    """Take out the Reshapes to one row of tokens and back, with products for the Gemms between.

    Returns the number of Gemms. Changes nothing when a node between them is not known to treat
    every token alike.
    """
    inside = list(_inside(model.graph))
    ends = [node for node in inside if _is_back(node)]
    between = [node for node in inside if node not in ends]
    flat = {value for node in between for value in node.outputs}
    starts = [node for node in between if _is_start(node)]
    known = all(_is_known(node, flat) for node in between if node not in starts)
    if not starts or not known or any(v.is_graph_output() for v in flat):
        return 0
    for node in between:
        if node not in starts:
            _widen(node)
    for node in (*starts, *ends):
        source = node.inputs[0]
        assert source is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], source)
        remove_dead([node])
    gemms = [node for node in between if node.op_type == "Gemm"]
    for gemm in gemms:
        _product(gemm)
    return len(gemms)


def _inside(graph: ir.Graph) -> Iterator[ir.Node]:
    """From the Reshapes to one row to those back, in the graph's order."""
    flat = set[ir.Value]()
    for node in graph:
        if _is_start(node) or flat.intersection(v for v in node.inputs if v is not None):
            if not _is_back(node):
                flat.update(node.outputs)
            yield node


def _is_start(node: ir.Node) -> bool:
    before, after = _reshaped(node)
    return len(before) == 3 and before[:2] == ("batch", "seq") and after[1:] == before[2:]


def _is_back(node: ir.Node) -> bool:
    before, after = _reshaped(node)
    return len(before) == 2 and after[:2] == ("batch", "seq") and after[2:] == before[1:]


def _reshaped(node: ir.Node) -> tuple[tuple[int | str, ...], tuple[int | str, ...]]:
    if node.op_type != "Reshape":
        return (), ()
    return dims(node.inputs[0]) or (), dims(node.outputs[0]) or ()


def _is_known(node: ir.Node, flat: set[ir.Value]) -> bool:
    others = [v for v in node.inputs if v is not None and v not in flat]
    if node.op_type == "Gemm":
        numbers = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        plain = numbers == [1.0, 1.0] and node.attributes.get_int("transA", 0) == 0
        return plain and node.inputs[0] in flat and len(others) == 2
    if node.op_type not in POINTWISE and node.op_type not in NORMS:
        return False
    if node.op_type in NORMS and node.attributes.get_int("axis", -1) not in (-1, 1):
        return False
    return all(shape is not None and len(shape) <= 1 for shape in map(dims, others))


def _widen(node: ir.Node) -> None:
    for value in node.outputs:
        size = dims(value)
        assert size is not None
        value.shape = ir.Shape(["batch", "seq", size[-1]])
    if node.op_type in NORMS:
        node.attributes["axis"] = ir.AttrInt64("axis", -1)


def _product(gemm: ir.Node) -> None:
    """x W + b, where W is [in, out], or [out, in] with transB."""
    x, weight, bias = gemm.inputs
    if gemm.attributes.get_int("transB", 0):
        product = make(gemm, "FusedMatMul", [x, weight], {"transB": 1}, MICROSOFT)
    else:
        product = make(gemm, "MatMul", [x, weight])
    product.name = weight.name if weight is not None else None
    old, out = gemm.outputs[0], product.outputs[0]
    out.name, out.type, out.shape = f"{old.name}.product", old.type, old.shape
    take_over(old, make(gemm, "Add", [out, bias]).outputs[0])
    graph_of(gemm).remove(gemm, safe=True)
