"""Queries, keys and values that stand together for each head, brought apart by their weight."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.arrangement import Arrangement
from trtllm_lite.exporter.passes import pack_weights, regroup_heads, weight_arrangements

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]
Ops = Callable[[ir.Model], list[str]]
Array = Callable[..., Any]

HEADS, DIM, HIDDEN = 3, 2, 4
ROWS = HEADS * 3 * DIM
TEXT = """agraph (float[batch,seq,4] xWEIGHTS)
    => (float[batch,3,seq,2] y, float[batch,3,seq,2] z, float[batch,3,seq,2] u) {
    apart = Constant<value = int64[4] {0, 0, 3, 6}>()
    sizes = Constant<value = int64[3] {2, 2, 2}>()
    product = com.microsoft.FusedMatMul<transB = 1>(x, w)
    biased = Add(product, b)
    h = Reshape(biased, apart)
    t = Transpose<perm = [0, 2, 1, 3]>(h)
    q, k, v = Split<axis = -1>(t, sizes)
    y = Neg(q)
    z = Neg(k)
    u = Neg(v)
}"""
PLAIN = TEXT.replace("    biased = Add(product, b)\n", "").replace("(biased,", "(product,")
SHAPES = {"w": (ROWS, HIDDEN), "b": (ROWS,)}
ALIKE = (HEADS, 3, DIM)


# What the tracer knows.
KNOWN: dict[str, list[int | str]] = {
    "product": ["batch", "seq", ROWS],
    "biased": ["batch", "seq", ROWS],
    "h": ["batch", "seq", HEADS, 3 * DIM],
    "t": ["batch", HEADS, "seq", 3 * DIM],
    **{part: ["batch", HEADS, "seq", DIM] for part in "qkv"},
}


def build(make_graph: Make, text: str, shapes: dict[str, tuple[int, ...]]) -> ir.Model:
    made = make_graph(text, shapes)
    for value in [v for node in made.graph for v in node.outputs]:
        if value.name in KNOWN:
            value.shape = ir.Shape(KNOWN[value.name])
        value.type = ir.TensorType(ir.DataType.FLOAT)
    return made


@pytest.mark.parametrize("axis", [-1, 3])
@pytest.mark.parametrize("text", [TEXT, PLAIN], ids=["with a bias", "without"])
def test_heads_are_regrouped(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array, text: str, axis: int
) -> None:
    shapes = SHAPES if "Add" in text else {"w": SHAPES["w"]}
    made = build(make_graph, text.replace("Split<axis = -1>", f"Split<axis = {axis}>"), shapes)
    feeds, weights = {"x": array(2, 5, HIDDEN)}, {n: array(*s) for n, s in shapes.items()}
    before = run_graph(made, feeds, weights)
    assert regroup_heads(made) == 1
    first = ["FusedMatMul", "Add", "Split"] if "b" in shapes else ["FusedMatMul", "Split"]
    assert ops(made)[: len(first)] == first
    assert ops(made).count("Reshape") == ops(made).count("Transpose") == 3
    for got, want in zip(run_graph(made, feeds, weights), before, strict=True):
        assert np.array_equal(got, want)
    assert regroup_heads(made) == 0
    wanted = {"w": Arrangement((*ALIKE, HIDDEN), (1, 0, 2, 3)), "b": Arrangement(ALIKE, (1, 0, 2))}
    for name in shapes:
        assert weight_arrangements(made.graph.initializers[name]) == {name: wanted[name]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64[3] {2, 2, 2}", "int64[3] {1, 3, 2}"),
        ("perm = [0, 2, 1, 3]", "perm = [0, 2, 3, 1]"),
        ("Split<axis = -1>(t", "Split<axis = -1>(s"),
        ("    y = Neg(q)", "    seen = Neg(biased)\n    y = Neg(q)"),
        ("    y = Neg(q)", "    seen = Neg(t)\n    y = Neg(q)"),
        ("    y = Neg(q)", "    seen = Neg(w)\n    y = Neg(q)"),
        ("    y = Neg(q)", "    seen = Neg(b)\n    y = Neg(q)"),
        ("h = Reshape(biased", "h = Reshape(x"),
    ],
    ids=[
        "unequal parts",
        "another order",
        "a node between",
        "the product is read elsewhere",
        "the heads are read elsewhere",
        "the weight is read elsewhere",
        "the bias is read elsewhere",
        "no product",
    ],
)
def test_other_splits_stay(make_graph: Make, ops: Ops, old: str, new: str) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new)
    if "(s" in new:
        text = text.replace("    q, k", "    s = Abs(t)\n    q, k")
    made = build(make_graph, text, SHAPES)
    if "{1, 3, 2}" in new:
        for value, size in zip(_split(made).outputs, (1, 3, 2), strict=True):
            value.shape = ir.Shape(["batch", 3, "seq", size])
    before = ops(made)
    assert regroup_heads(made) == 0
    assert ops(made) == before


def test_a_weight_of_several_parameters_stays(make_graph: Make) -> None:
    made = build(make_graph, PLAIN, {"w": (ROWS - 4, HIDDEN), "more": (4, HIDDEN)})
    weights = dict(made.graph.initializers)
    product = next(node for node in made.graph if node.op_type == "FusedMatMul")
    product.replace_input_with(1, pack_weights(made.graph, [weights["w"], weights["more"]]))
    assert regroup_heads(made) == 0


def _split(made: ir.Model) -> ir.Node:
    return next(node for node in made.graph if node.op_type == "Split")
