"""Norms, alone and with the addition before them; activations; the picked tokens."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.passes import (
    external_weights,
    fold_constants,
    fold_offsets,
    fuse_activation,
    fuse_layer_norm,
    fuse_rms_norm,
    fuse_skip_norm,
    hoist_tokens,
    pick_tokens,
    weight_offset,
    weight_parts,
)

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]
Ops = Callable[[ir.Model], list[str]]
Array = Callable[..., Any]

# fuse_rms_norm

RMS = """agraph (float[2,3,8] xWEIGHTS) => (float[2,3,8] y) {
    two = Constant<value = float {2.0}>()
    eps = Constant<value = float {0.00001}>()
    axes = Constant<value = int64[1] {-1}>()
    p = Pow(x, two)
    m = ReduceMean<keepdims = 1, noop_with_empty_axes = 0>(p, axes)
    s = Add(m, eps)
    q = Sqrt(s)
    r = Reciprocal(q)
    n = Mul(x, r)
    y = Mul(w, n)
}"""


def test_fuse_rms_norm(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    made, x, w = make_graph(RMS, {"w": (8,)}), array(2, 3, 8), array(8)
    fold_constants(made)
    before = run_graph(made, {"x": x}, {"w": w})
    want = w * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(before[0], want, rtol=1e-5)
    assert fuse_rms_norm(made) == 1
    assert ops(made) == ["RMSNormalization"]
    np.testing.assert_allclose(run_graph(made, {"x": x}, {"w": w})[0], want, rtol=1e-5)


def test_a_mean_over_another_axis_is_no_rms_norm(make_graph: Make) -> None:
    made = make_graph(RMS.replace("int64[1] {-1}", "int64[1] {1}"), {"w": (8,)})
    fold_constants(made)
    assert fuse_rms_norm(made) == 0


# fuse_layer_norm

CENTRED = """agraph (float[2,3,8] x, float[2,3,8] zWEIGHTS) => (float[2,3,8] y) {
    axes = Constant<value = int64[1] {-1}>()
    m = ReduceMean<keepdims = 1>(x, axes)
    c = Sub(x, m)
    y = RMSNormalization<axis = -1, epsilon = 0.001>(c, w)
}"""


def test_fuse_layer_norm(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    made, x, w = make_graph(CENTRED, {"w": (8,)}), array(2, 3, 8), array(8)
    assert fuse_layer_norm(made) == 1
    assert ops(made) == ["LayerNormalization"]
    centred = x - x.mean(-1, keepdims=True)
    want = w * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
    (got,) = run_graph(made, {"x": x, "z": x}, {"w": w})
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_a_layer_norm_with_weights_of_each_head(
    make_graph: Make, run_graph: Run, array: Array
) -> None:
    made, x, w = make_graph(CENTRED, {"w": (3, 8)}), array(2, 3, 8), array(3, 8)
    (before,) = run_graph(made, {"x": x, "z": x}, {"w": w})
    assert fuse_layer_norm(made) == 1
    (got,) = run_graph(made, {"x": x, "z": x}, {"w": w})
    np.testing.assert_allclose(got, before, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [("int64[1] {-1}", "int64[1] {1}"), ("ReduceMean<keepdims = 1>(x", "ReduceMean(z")],
    ids=["mean over another axis", "mean of another value"],
)
def test_no_layer_norm(make_graph: Make, old: str, new: str) -> None:
    assert old in CENTRED
    assert fuse_layer_norm(make_graph(CENTRED.replace(old, new), {"w": (8,)})) == 0


# fuse_skip_norm

SKIP = """agraph (float[batch,seq,8] x, float[batch,seq,8] zWEIGHTS)
    => (float[batch,seq,8] y, float[batch,seq,8] next) {
    SUM
    y = NORM
    next = Neg(s)
}"""
NORMS = {
    "SkipSimplifiedLayerNormalization": "RMSNormalization<axis = -1, epsilon = 0.01>(s, w)",
    "SkipLayerNormalization": "LayerNormalization<axis = -1, epsilon = 0.01>(s, w, b)",
}
SUMS = {
    "plain": "s = Add(x, z)",
    "bias": "zb = Add(z, o)\n    s = Add(x, zb)",
    "bias first": "zb = Add(o, z)\n    s = Add(zb, x)",
}
WEIGHTS = {"w": (8,), "b": (8,), "o": (8,)}


def skip(make_graph: Make, total: str, norm: str) -> ir.Model:
    return make_graph(SKIP.replace("SUM", total).replace("NORM", norm), WEIGHTS)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("total", SUMS.values(), ids=SUMS.keys())
def test_fuse_skip_norm(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array, op: str, total: str
) -> None:
    made = skip(make_graph, total, NORMS[op])
    feeds = {"x": array(2, 3, 8), "z": array(2, 3, 8)}
    weights = {n: array(*s) for n, s in WEIGHTS.items()}
    before = run_graph(made, feeds, weights)
    assert fuse_skip_norm(made) == 1
    assert ops(made) == [op, "Neg"]
    for got, want in zip(run_graph(made, feeds, weights), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_sum_that_only_the_norm_reads(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array
) -> None:
    text = SKIP.replace(", float[batch,seq,8] next", "").replace("next = Neg(s)", "")
    norm = NORMS["SkipSimplifiedLayerNormalization"]
    made = make_graph(text.replace("SUM", SUMS["plain"]).replace("NORM", norm), {"w": (8,)})
    feeds, w = {"x": array(2, 3, 8), "z": array(2, 3, 8)}, array(8)
    before = run_graph(made, feeds, {"w": w})[0]
    assert fuse_skip_norm(made) == 1
    assert len(made.graph[0].outputs) == 1
    np.testing.assert_allclose(run_graph(made, feeds, {"w": w})[0], before, rtol=1e-5)


def test_two_norms_of_one_sum(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    """As in a parallel block: the second reads the sum that the first one gives."""
    norm = "RMSNormalization<axis = -1>(s, w)\n    y2 = RMSNormalization<axis = -1>(s, o)"
    text = SKIP.replace("next)", "next, float[batch,seq,8] y2)")
    made = make_graph(text.replace("SUM", SUMS["plain"]).replace("NORM", norm), WEIGHTS)
    feeds = {"x": array(2, 3, 8), "z": array(2, 3, 8)}
    weights = {n: array(*s) for n, s in WEIGHTS.items()}
    before = run_graph(made, feeds, weights)
    assert fuse_skip_norm(made) == 1
    assert sorted(ops(made)) == ["Neg", "RMSNormalization", "SkipSimplifiedLayerNormalization"]
    for got, want in zip(run_graph(made, feeds, weights), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("total", "norm"),
    [
        ("s = Add(x, o)", NORMS["SkipSimplifiedLayerNormalization"]),
        ("s = Sub(x, z)", NORMS["SkipSimplifiedLayerNormalization"]),
        (SUMS["plain"], "RMSNormalization<axis = 1>(s, w)"),
        (SUMS["plain"], "Mul(s, w)"),
    ],
    ids=["a bias alone", "a difference", "another axis", "no norm"],
)
def test_no_skip_norm(make_graph: Make, total: str, norm: str) -> None:
    assert fuse_skip_norm(skip(make_graph, total, norm)) == 0


# fuse_activation

SILU = """agraph (float[2,8] x, float[2,8] z) => (float[2,8] y) {
    s = Sigmoid(x)
    y = Mul(LEFT, RIGHT)
}"""
GELU = """agraph (float[2,8] x) => (float[2,8] y) {
    half = Constant<value = float {0.5}>()
    one = Constant<value = float {1.0}>()
    three = Constant<value = float {3.0}>()
    small = Constant<value = float {0.044715}>()
    root = Constant<value = float {0.7978845608028654}>()
    a = Mul(x, half)
    p = Pow(x, three)
    c = Mul(p, small)
    i = Add(x, c)
    m = Mul(i, root)
    t = Tanh(m)
    u = Add(t, one)
    y = Mul(a, u)
}"""


@pytest.mark.parametrize(("left", "right"), [("x", "s"), ("s", "x")])
def test_silu(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array, left: str, right: str
) -> None:
    made = make_graph(SILU.replace("LEFT", left).replace("RIGHT", right))
    x = array(2, 8)
    assert fuse_activation(made) == 1
    assert ops(made) == ["QuickGelu"]
    (got,) = run_graph(made, {"x": x, "z": x})
    np.testing.assert_allclose(got, x / (1 + np.exp(-x)), rtol=1e-5, atol=1e-6)


def test_the_sigmoid_of_another_value_is_no_silu(make_graph: Make, ops: Ops) -> None:
    made = make_graph(SILU.replace("LEFT", "z").replace("RIGHT", "s"))
    assert fuse_activation(made) == 0
    assert ops(made) == ["Sigmoid", "Mul"]


def test_gelu(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    made, x = make_graph(GELU), array(2, 8)
    before = run_graph(made, {"x": x})[0]
    assert fuse_activation(made) == 1
    assert ops(made) == ["Gelu"]
    np.testing.assert_allclose(run_graph(made, {"x": x})[0], before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", ["0.5", "1.0", "3.0", "0.044715", "0.7978845608028654"])
def test_another_number_is_no_gelu(make_graph: Make, number: str) -> None:
    assert f"float {{{number}}}" in GELU
    made = make_graph(GELU.replace(f"float {{{number}}}", "float {0.7}"))
    assert fuse_activation(made) == 0


# pick_tokens

PICK = """agraph (float[batch,seq,8] x, int64[batch,n] i) => (float[batch,n,8] y) {
    two = Constant<value = int64[1] {2}>()
    shape = Constant<value = int64[3] {1, 1, 8}>()
    u = Unsqueeze(i, two)
    e = Expand(u, shape)
    y = GatherElements<axis = 1>(x, e)
}"""


def test_pick_tokens(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    made, x, i = make_graph(PICK), array(2, 5, 8), np.array([[4, 0, 4], [1, 1, 2]])
    assert pick_tokens(made) == 1
    assert ops(made) == ["Unsqueeze", "GatherND"]
    (got,) = run_graph(made, {"x": x, "i": i})
    assert np.array_equal(got, np.stack([x[0, i[0]], x[1, i[1]]]))


def test_a_gather_along_another_axis_stays(make_graph: Make) -> None:
    assert pick_tokens(make_graph(PICK.replace("axis = 1", "axis = 0"))) == 0


# hoist_tokens

TAIL = """agraph (float[batch,seq,8] x, float[batch,seq,8] r, int64[batch,n] iWEIGHTS)
    => (float[batch,n,5] yMORE) {
    two = Constant<value = int64[1] {2}>()
    before = Softmax<axis = 1>(x)
    a = com.microsoft.FusedMatMul<transB = 1>(before, w)
    s = Add(r, a)
    t = RMSNormalization<axis = -1>(s, g)
    h = com.microsoft.QuickGelu<alpha = 1.0>(t)
    last = Add(h, s)
    EXTRA
    u = Unsqueeze(i, two)
    picked = GatherND<batch_dims = 1>(last, u)
    y = com.microsoft.FusedMatMul<transB = 1>(picked, head)
}"""
TAIL_WEIGHTS = {"w": (8, 8), "g": (8,), "head": (5, 8)}


def tail(make_graph: Make, more: str = "", extra: str = "") -> ir.Model:
    made = make_graph(TAIL.replace("MORE", more).replace("EXTRA", extra), TAIL_WEIGHTS)
    sizes = {"a": 8, "s": 8, "t": 8, "h": 8, "last": 8, "before": 8}
    for value in [v for node in made.graph for v in node.outputs]:
        if value.name in sizes:
            value.shape = ir.Shape(["batch", "seq", sizes[str(value.name)]])
            value.type = ir.TensorType(ir.DataType.FLOAT)
        if value.name == "picked":
            value.shape = ir.Shape(["batch", "n", 8])
    return made


def test_hoist_tokens(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    """A node that mixes tokens keeps them all; those after it see the picked ones."""
    made = tail(make_graph)
    feeds = {"x": array(2, 5, 8), "r": array(2, 5, 8), "i": np.array([[4, 0], [1, 2]])}
    weights = {n: array(*s) for n, s in TAIL_WEIGHTS.items()}
    (before,) = run_graph(made, feeds, weights)
    assert hoist_tokens(made) == 5
    assert ops(made)[0] == "Softmax"
    assert Counter(ops(made))["GatherND"] == 2
    assert ops(made).index("GatherND") < ops(made).index("FusedMatMul")
    (got,) = run_graph(made, feeds, weights)
    np.testing.assert_allclose(got, before, rtol=1e-5, atol=1e-6)
    shapes = {str(v.name): v.shape for node in made.graph for v in node.outputs}
    assert shapes["s"] == shapes["last"] == ir.Shape(["batch", "n", 8])
    assert hoist_tokens(made) == 0


def test_what_others_read_keeps_its_tokens(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array
) -> None:
    made = tail(make_graph, ", float[batch,seq,8] seen", "seen = Softmax<axis = 1>(s)")
    feeds = {"x": array(2, 5, 8), "r": array(2, 5, 8), "i": np.array([[4, 0], [1, 2]])}
    weights = {n: array(*s) for n, s in TAIL_WEIGHTS.items()}
    before = run_graph(made, feeds, weights)
    assert hoist_tokens(made) == 3
    for got, want in zip(run_graph(made, feeds, weights), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# fold_offsets

OFFSET = """agraph (float[2,3,8] xWEIGHTS) => (float[2,3,8] y) {
    one = Constant<value = float {1.0}>()
    scale = Add(LEFT, RIGHT)
    y = RMSNormalization<axis = -1>(x, scale)
}"""


@pytest.mark.parametrize(("left", "right"), [("w", "one"), ("one", "w")])
def test_fold_offsets(make_graph: Make, ops: Ops, left: str, right: str) -> None:
    made = make_graph(OFFSET.replace("LEFT", left).replace("RIGHT", right), {"w": (8,)})
    assert fold_offsets(made) == 1
    assert ops(made) == ["RMSNormalization"]
    ((name, weight),) = external_weights([made]).items()
    assert (name, weight_parts(weight), weight_offset(weight)) == ("w.plus_1", ("w",), 1.0)


def test_a_weight_that_is_read_elsewhere_keeps_its_offset_apart(make_graph: Make) -> None:
    text = OFFSET.replace("LEFT", "w").replace("RIGHT", "one")
    text = text.replace("float[2,3,8] y)", "float[2,3,8] y, float[8] z)")
    text = text.replace("scale =", "z = Neg(w)\n    scale =")
    assert fold_offsets(make_graph(text, {"w": (8,)})) == 0
