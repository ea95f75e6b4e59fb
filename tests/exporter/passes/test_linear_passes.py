"""Linear layers: fused, packed, and left alone where it would change something."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.arrangement import Arrangement
from trtllm_lite.exporter.passes import (
    external_weights,
    fuse_linear,
    pack_projections,
    scopes,
    turn_weights,
    weight_arrangements,
    weight_parts,
)
from trtllm_lite.exporter.passes.weights import arrange_weight, is_single

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]
Ops = Callable[[ir.Model], list[str]]
Array = Callable[..., Any]

LINEAR = """agraph (float[2,3] xWEIGHTS) => (float[2,5] y) {
    t = Transpose<perm = [1, 0]>(w)
    y = MatMul(x, t)
}"""


# fuse_linear


def test_fuse_linear(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    made, x, w = make_graph(LINEAR, {"w": (5, 3)}), array(2, 3), array(5, 3)
    before = run_graph(made, {"x": x}, {"w": w})
    assert fuse_linear(made) == 1
    assert ops(made) == ["FusedMatMul"]
    (node,) = made.graph
    assert (node.domain, node.name) == ("com.microsoft", "w")
    assert [v.name for v in node.inputs if v is not None] == ["x", "w"]
    np.testing.assert_allclose(run_graph(made, {"x": x}, {"w": w})[0], before[0], rtol=1e-6)
    np.testing.assert_allclose(before[0], x @ w.T, rtol=1e-5)
    assert fuse_linear(made) == 0


def test_fuse_linear_of_a_weight_that_is_read_twice(
    make_graph: Make, run_graph: Run, array: Array
) -> None:
    """A tied embedding: gathered from, and transposed for the output layer."""
    made = make_graph(
        """agraph (float[2,3] x, int64[2] iWEIGHTS) => (float[2,5] y, float[2,3] e) {
            e = Gather(w, i)
            t = Transpose<perm = [1, 0]>(w)
            y = MatMul(x, t)
        }""",
        {"w": (5, 3)},
    )
    feeds, weights = {"x": array(2, 3), "i": np.array([4, 0])}, {"w": array(5, 3)}
    before = run_graph(made, feeds, weights)
    assert fuse_linear(made) == 1
    for got, want in zip(run_graph(made, feeds, weights), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert list(external_weights([made])) == ["w"]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        (
            "agraph (float[2,3] x, float[5,3] wWEIGHTS) => (float[2,5] y) "
            "{ t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) }",
            {},
        ),
        ("agraph (float[2,3] xWEIGHTS) => (float[2,5] y) { y = MatMul(x, w) }", {"w": (3, 5)}),
        (
            "agraph (float[2,3] xWEIGHTS) => (float[5,2] y) "
            "{ t = Transpose<perm = [1, 0]>(x) y = MatMul(w, t) }",
            {"w": (5, 3)},
        ),
        (
            "agraph (float[4,2,3] xWEIGHTS) => (float[4,2,5] y) "
            "{ t = Transpose<perm = [0, 2, 1]>(w) y = MatMul(x, t) }",
            {"w": (4, 5, 3)},
        ),
        (
            "agraph (float[3,3] xWEIGHTS) => (float[3,3] y) "
            "{ t = Transpose<perm = [0, 1]>(w) y = MatMul(x, t) }",
            {"w": (3, 3)},
        ),
    ],
    ids=["activation", "untransposed", "left side", "three dimensions", "not swapped"],
)
def test_fuse_linear_leaves_others_alone(
    make_graph: Make, ops: Ops, text: str, weights: dict[str, tuple[int, ...]]
) -> None:
    made = make_graph(text, weights)
    before = ops(made)
    assert fuse_linear(made) == 0
    assert ops(made) == before


def test_scopes_survive_fusion(make_graph: Make) -> None:
    made = make_graph(LINEAR, {"w": (5, 3)})
    for node in made.graph:
        node.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'model.layers.3']"
    fuse_linear(made)
    assert [scopes(node) for node in made.graph] == [["", "model.layers.3"]]


# turn_weights

UNTURNED = """agraph (float[2,3] xWEIGHTS) => (float[2,5] z) {
    y = MatMul(x, w)
    z = Neg(y)
}"""


def test_turn_weights(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    made, x, w = make_graph(UNTURNED, {"w": (3, 5)}), array(2, 3), array(3, 5)
    assert turn_weights(made) == 1
    assert ops(made) == ["FusedMatMul", "Neg"]
    assert made.graph[0].name == "w"
    ((name, turned),) = external_weights([made]).items()
    assert (name, turned.shape) == ("w", ir.Shape([5, 3]))
    assert weight_arrangements(turned) == {"w": Arrangement((3, 5), (1, 0))}
    np.testing.assert_allclose(run_graph(made, {"x": x}, {"w": w})[0], -(x @ w), rtol=1e-5)
    assert turn_weights(made) == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [("z = Neg(y)", "z = Neg(y)\n    seen = Neg(w)"), ("MatMul(x, w)", "MatMul(x, i)")],
    ids=["read twice", "numbers of the graph"],
)
def test_turn_weights_leaves_others_alone(make_graph: Make, ops: Ops, old: str, new: str) -> None:
    assert old in UNTURNED
    text = UNTURNED.replace(old, new).replace("x, i)", "x, i)\n    u = Neg(w)")
    text = text.replace("    y =", "    i = Constant<value = float[3,1] {1, 2, 3}>()\n    y =")
    made = make_graph(text, {"w": (3, 5)})
    before = ops(made)
    assert turn_weights(made) == 0
    assert ops(made) == before


def test_a_packed_weight_knows_which_parts_are_turned(make_graph: Make) -> None:
    made = make_graph(THREE, SHAPES)
    for name in ("wq", "wk"):
        rows, columns = SHAPES[name]
        weight = made.graph.initializers[name]
        arrange_weight(weight, (columns, rows), (1, 0), (rows, columns))
    assert pack_projections(made) == 1
    (packed,) = external_weights([made]).values()
    assert set(weight_arrangements(packed)) == {"wq", "wk"}
    assert not is_single(packed)


# pack_projections

THREE = """agraph (float[2,3] xWEIGHTS) => (float[2,4] q, float[2,2] k, float[2,2] v) {
    q = com.microsoft.FusedMatMul<transB = 1>(x, wq)
    k = com.microsoft.FusedMatMul<transB = 1>(x, wk)
    v = com.microsoft.FusedMatMul<transB = 1>(x, wv)
}"""
BIASED = """agraph (float[2,3] xWEIGHTS) => (float[2,4] q, float[2,2] k, float[2,2] v) {
    q1 = com.microsoft.FusedMatMul<transB = 1>(x, wq)
    q = Add(q1, bq)
    k1 = com.microsoft.FusedMatMul<transB = 1>(x, wk)
    k = Add(bk, k1)
    v = com.microsoft.FusedMatMul<transB = 1>(x, wv)
}"""
SHAPES = {"wq": (4, 3), "wk": (2, 3), "wv": (2, 3)}


def test_pack_projections(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    made = make_graph(THREE, SHAPES)
    feeds, weights = {"x": array(2, 3)}, {n: array(*s) for n, s in SHAPES.items()}
    before = run_graph(made, feeds, weights)
    assert pack_projections(made) == 1
    assert ops(made) == ["FusedMatMul", "Split"]
    ((name, packed),) = external_weights([made]).items()
    assert name == "wq+wk+wv"
    assert weight_parts(packed) == ("wq", "wk", "wv")
    assert packed.shape == ir.Shape([8, 3])
    assert made.graph[0].name == "wq"
    after = run_graph(made, feeds, weights)
    for got, want, weight in zip(after, before, weights.values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(want, feeds["x"] @ weight.T, rtol=1e-5)
    assert pack_projections(made) == 0


def test_biases_are_packed_and_layers_without_one_are_not(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array
) -> None:
    shapes = {**SHAPES, "bq": (4,), "bk": (2,)}
    made = make_graph(BIASED, shapes)
    feeds, weights = {"x": array(2, 3)}, {n: array(*s) for n, s in shapes.items()}
    before = run_graph(made, feeds, weights)
    assert pack_projections(made) == 1
    assert sorted(ops(made)) == ["Add", "FusedMatMul", "FusedMatMul", "Split"]
    assert set(external_weights([made])) == {"wq+wk", "bq+bk", "wv"}
    for got, want in zip(run_graph(made, feeds, weights), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_weight_that_something_else_reads_is_not_packed(make_graph: Make) -> None:
    text = THREE.replace("float[2,2] v)", "float[2,2] v, float[4,3] seen)").replace(
        "}", "seen = Neg(wq) }"
    )
    made = make_graph(text, SHAPES)
    assert pack_projections(made) == 1
    assert set(external_weights([made])) == {"wq", "wk+wv"}


def test_layers_of_other_modules_are_packed_apart(make_graph: Make) -> None:
    """As where attention and feed-forward part read one norm."""
    names = ("self_attn.q.weight", "self_attn.k.weight", "mlp.gate.weight", "mlp.up.weight")
    made = make_graph(
        """agraph (float[2,3] xWEIGHTS)
            => (float[2,4] q, float[2,4] k, float[2,4] g, float[2,4] u) {
            q = com.microsoft.FusedMatMul<transB = 1>(x, w0)
            g = com.microsoft.FusedMatMul<transB = 1>(x, w2)
            k = com.microsoft.FusedMatMul<transB = 1>(x, w1)
            u = com.microsoft.FusedMatMul<transB = 1>(x, w3)
        }""",
        {f"w{i}": (4, 3) for i in range(4)},
    )
    for i, name in enumerate(names):
        value = made.graph.initializers.pop(f"w{i}")
        value.name = name
        made.graph.initializers[name] = value
    assert pack_projections(made) == 2
    assert set(external_weights([made])) == {"+".join(names[:2]), "+".join(names[2:])}


def test_layers_of_other_inputs_are_not_packed(make_graph: Make, ops: Ops) -> None:
    made = make_graph(
        """agraph (float[2,3] x, float[2,3] zWEIGHTS) => (float[2,4] q, float[2,2] k) {
            q = com.microsoft.FusedMatMul<transB = 1>(x, wq)
            k = com.microsoft.FusedMatMul<transB = 1>(z, wk)
        }""",
        {"wq": (4, 3), "wk": (2, 3)},
    )
    assert pack_projections(made) == 0
    assert ops(made) == ["FusedMatMul"] * 2
