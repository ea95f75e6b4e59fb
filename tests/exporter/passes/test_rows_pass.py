"""Tokens in one row, as some modelling code sees them, back in their batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.passes import widen_rows

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]
Ops = Callable[[ir.Model], list[str]]
Array = Callable[..., Any]

# A feed-forward block of OPT: norm, two layers and the residual addition in rows of tokens.
BLOCK = """agraph (float[batch,seq,4] xWEIGHTS) => (float[batch,seq,4] y) {
    rows = Constant<value = int64[2] {-1, 4}>()
    back = Constant<value = int64[3] {2, 3, 4}>()
    flat = Reshape(x, rows)
    n = LayerNormalization<axis = -1>(flat, g)
    a = Gemm<transB = 1>(n, w1, b1)
    r = MIDDLE
    b = Gemm<GEMM>(r, w2, b2)
    s = Add(flat, b)
    y0 = Reshape(s, back)
    y = Neg(y0)
}"""
WEIGHTS = {"g": (4,), "w1": (6, 4), "b1": (6,), "w2": (6, 4), "b2": (4,)}
SIZES = {"flat": 4, "n": 4, "a": 6, "r": 6, "b": 4, "s": 4}


def block(make_graph: Make, middle: str = "Relu(a)", gemm: str = "transB = 0") -> ir.Model:
    made = make_graph(BLOCK.replace("MIDDLE", middle).replace("GEMM", gemm), WEIGHTS)
    for value in [v for node in made.graph for v in node.outputs]:
        if value.name in SIZES:
            value.shape = ir.Shape(["tokens", SIZES[str(value.name)]])
        if value.name == "y0":
            value.shape = ir.Shape(["batch", "seq", 4])
        value.type = ir.TensorType(ir.DataType.FLOAT)
    return made


def test_widen_rows(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    made = block(make_graph)
    feeds, weights = {"x": array(2, 3, 4)}, {n: array(*s) for n, s in WEIGHTS.items()}
    (before,) = run_graph(made, feeds, weights)
    assert widen_rows(made) == 2
    products = ["FusedMatMul", "Add", "Relu", "MatMul", "Add"]
    assert ops(made) == ["LayerNormalization", *products, "Add", "Neg"]
    assert [node.name for node in made.graph if "MatMul" in node.op_type] == ["w1", "w2"]
    shapes = {str(v.name): v.shape for node in made.graph for v in node.outputs}
    assert shapes["a"] == ir.Shape(["batch", "seq", 6])
    (got,) = run_graph(made, feeds, weights)
    np.testing.assert_allclose(got, before, rtol=1e-5, atol=1e-6)
    assert widen_rows(made) == 0


@pytest.mark.parametrize(
    ("middle", "gemm"),
    [
        ("Softmax<axis = 0>(a)", "transB = 0"),
        ("Relu(a)", "alpha = 2.0"),
        ("Relu(a)", "beta = 0.5"),
    ],
    ids=["tokens are mixed", "scaled product", "scaled bias"],
)
def test_a_stretch_that_is_not_known_stays(
    make_graph: Make, ops: Ops, middle: str, gemm: str
) -> None:
    made = block(make_graph, middle, gemm)
    before = ops(made)
    assert widen_rows(made) == 0
    assert ops(made) == before
