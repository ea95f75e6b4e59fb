"""Reshapes, transposes and slices: gone, constant, or one Split."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.passes import fold_scale, pack_attention, simplify_layouts, split_slices

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]
Ops = Callable[[ir.Model], list[str]]
Array = Callable[..., Any]

# Heads apart and together again, with a norm of each head between.
HEADS = """agraph (float[batch,seq,8] xWEIGHTS) => (float[batch,seq,8] y) {
    apart = Constant<value = int64[4] {0, 0, 2, 4}>()
    joined = Constant<value = int64[3] {0, 0, 8}>()
    a = Reshape(x, apart)
    b = Transpose<perm = [0, 2, 1, 3]>(a)
    NORM
    d = Transpose<perm = [0, 2, 1, 3]>(c)
    y0 = Reshape(d, joined)
    y = Neg(y0)
}"""
NORM = "c = RMSNormalization<axis = -1>(b, w)"


def test_layouts_that_undo_each_other_go(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array
) -> None:
    text = HEADS.replace("NORM", "").replace("(c)", "(b)")
    made, x = make_graph(text), array(2, 3, 8)
    assert simplify_layouts(made) == 2
    assert ops(made) == ["Neg"]
    assert np.array_equal(run_graph(made, {"x": x})[0], -x)


def test_a_norm_of_the_last_axis_needs_no_transpose(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array
) -> None:
    made = make_graph(HEADS.replace("NORM", NORM), {"w": (4,)})
    feeds, weights = {"x": array(2, 3, 8)}, {"w": array(4)}
    before = run_graph(made, feeds, weights)[0]
    assert simplify_layouts(made) == 1
    assert "Transpose" not in ops(made)
    assert np.array_equal(run_graph(made, feeds, weights)[0], before)


@pytest.mark.parametrize(
    ("norm", "weight"),
    [
        ("c = RMSNormalization<axis = -1>(b, w)", (2, 1, 4)),
        ("c = RMSNormalization<axis = 2>(b, w)", (4,)),
        ("c = Softmax<axis = 1>(b)", (4,)),
    ],
    ids=["a weight of its own for each head", "over two axes", "no norm"],
)
def test_other_nodes_keep_their_transposes(
    make_graph: Make, ops: Ops, norm: str, weight: tuple[int, ...]
) -> None:
    made = make_graph(HEADS.replace("NORM", norm), {"w": weight})
    simplify_layouts(made)
    assert ops(made).count("Transpose") == 2


def test_shapes_of_kept_dimensions_are_constant(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array
) -> None:
    made = make_graph(
        """agraph (float[batch,seq,8] x) => (float[batch,seq,2,4] y) {
            rest = Constant<value = int64[2] {2, 4}>()
            kept = Shape<end = 2>(x)
            shape = Concat<axis = 0>(kept, rest)
            y = Reshape<allowzero = 1>(x, shape)
        }"""
    )
    x = array(2, 3, 8)
    assert simplify_layouts(made) == 1
    assert ops(made) == ["Reshape"]
    assert np.array_equal(run_graph(made, {"x": x})[0], x.reshape(2, 3, 2, 4))


# split_slices

SLICES = """agraph (float[2,8] x) => (float[2,4] b, float[2,A] a) {
    zero = Constant<value = int64[1] {0}>()
    four = Constant<value = int64[1] {4}>()
    end = Constant<value = int64[1] {END}>()
    axis = Constant<value = int64[1] {1}>()
    a1 = Slice(x, zero, end, axis)
    a = Neg(a1)
    b1 = Slice(x, four, big, axis)
    b = Neg(b1)
}"""


def sliced(make_graph: Make, end: int, size: int) -> ir.Model:
    text = SLICES.replace("END", str(end)).replace("[2,A]", f"[2,{size}]")
    big = "big = Constant<value = int64[1] {9223372036854775807}>()\n    axis ="
    return make_graph(text.replace("axis =", big, 1))


def test_slices_that_tile_a_value_are_one_split(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array
) -> None:
    made, x = sliced(make_graph, 4, 4), array(2, 8)
    assert split_slices(made) == 1
    assert ops(made) == ["Split", "Neg", "Neg"]
    b, a = run_graph(made, {"x": x})
    assert np.array_equal(a, -x[:, :4])
    assert np.array_equal(b, -x[:, 4:])


@pytest.mark.parametrize("end", [3, 5])
def test_slices_with_a_gap_or_an_overlap_stay(make_graph: Make, ops: Ops, end: int) -> None:
    made = sliced(make_graph, end, end)
    assert split_slices(made) == 0
    assert "Split" not in ops(made)


def test_slices_of_a_slice(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    names = {"zero": 0, "two": 2, "four": 4, "eight": 8, "axis": 1}
    constants = "\n".join(f"{n} = Constant<value = int64[1] {{{v}}}>()" for n, v in names.items())
    made = make_graph(
        f"""agraph (float[2,8] x) => (float[2,2] a, float[2,2] b, float[2,4] c) {{
            {constants}
            left = Slice(x, zero, four, axis)
            right = Slice(x, four, eight, axis)
            first = Slice(left, zero, two, axis)
            second = Slice(left, two, four, axis)
            a = Neg(first)
            b = Neg(second)
            c = Neg(right)
        }}"""
    )
    x = array(2, 8)
    assert split_slices(made) == 2
    assert ops(made).count("Split") == 2
    got = run_graph(made, {"x": x})
    for part, want in zip(got, (x[:, :2], x[:, 2:4], x[:, 4:]), strict=True):
        assert np.array_equal(part, -want)


# pack_attention

ATTENTION = """agraph (float[batch,seq,SIZE] x, float[batch,2,capacity,8] pk,
    float[batch,2,capacity,8] pv, int32[batch] last, int32 total, int32[batch] counts)
    => (float[batch,seq,32] y, float[batch,2,capacity,8] k1, float[batch,2,capacity,8] v1MORE) {
    sizes = Constant<value = int64[COUNT] {SIZES}>()
    PARTS = Split<axis = -1>(x, sizes)
    y, k1, v1 = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>
        (q, k, v, pk, pv, last, total, , , , , , , , , , counts)
    EXTRA
}"""


def attention(make_graph: Make, parts: str, sizes: list[int], more: str = "") -> ir.Model:
    text = ATTENTION.replace("SIZES", ", ".join(map(str, sizes))).replace("PARTS", parts)
    text = text.replace("SIZE", str(sum(sizes))).replace("COUNT", str(len(sizes)))
    name, size = more.split(":") if more else ("", "")
    extra = f"seen = Neg({name})" if more else ""
    declared = f", float[batch,seq,{size}] seen" if more else ""
    return make_graph(text.replace("MORE", declared).replace("EXTRA", extra))


def feeds(array: Array, size: int) -> dict[str, Any]:
    return {
        "x": array(2, 3, size),
        "pk": array(2, 2, 9, 8),
        "pv": array(2, 2, 9, 8),
        "last": np.array([2, 5], np.int32),
        "total": np.array(6, np.int32),
        "counts": np.array([3, 2], np.int32),
    }


@pytest.mark.parametrize(
    ("parts", "sizes", "more"),
    [
        ("q, k, v", [32, 16, 16], ""),
        ("q, k, v, up", [32, 16, 16, 6], "up:6"),
        ("gate, q, k, v", [6, 32, 16, 16], "gate:6"),
    ],
)
def test_attention_reads_the_packed_projection(
    make_graph: Make, run_graph: Run, array: Array, parts: str, sizes: list[int], more: str
) -> None:
    made, given = attention(make_graph, parts, sizes, more), feeds(array, sum(sizes))
    before = run_graph(made, given)
    assert pack_attention(made) == 1
    (node,) = (n for n in made.graph if n.op_type == "GroupQueryAttention")
    assert (node.inputs[1], node.inputs[2]) == (None, None)
    after = run_graph(made, given)
    for row, count in enumerate(given["counts"]):
        np.testing.assert_allclose(after[0][row, :count], before[0][row, :count], rtol=1e-5)
    for got, want in zip(after[3:], before[3:], strict=True):
        assert np.array_equal(got, want)
    assert pack_attention(made) == 0


@pytest.mark.parametrize(
    ("parts", "sizes", "more"),
    [
        ("k, q, v", [16, 32, 16], ""),
        ("q, k, other, v", [32, 16, 6, 16], "other:6"),
        ("q, k, v", [32, 16, 16], "k:16"),
    ],
    ids=["another order", "not neighbours", "read elsewhere"],
)
def test_attention_over_other_parts_stays(
    make_graph: Make, parts: str, sizes: list[int], more: str
) -> None:
    assert pack_attention(attention(make_graph, parts, sizes, more)) == 0


# fold_scale

SCALED = """agraph (float[batch,seq,32] q, float[batch,seq,16] k, float[batch,seq,16] v,
    float[batch,2,capacity,8] pk, float[batch,2,capacity,8] pv, int32[batch] last, int32 total,
    int32[batch] counts)
    => (float[batch,seq,32] y, float[batch,2,capacity,8] k1, float[batch,2,capacity,8] v1) {
    number = Constant<value = float {0.7}>()
    s = Mul(q, number)
    y, k1, v1 = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, scale = 0.5>
        (s, k, v, pk, pv, last, total, , , , , , , , , , counts)
}"""


@pytest.mark.parametrize("product", ["Mul(q, number)", "Mul(number, q)"])
def test_scaled_queries(make_graph: Make, run_graph: Run, array: Array, product: str) -> None:
    made = make_graph(SCALED.replace("Mul(q, number)", product))
    given = feeds(array, 1) | {"q": array(2, 3, 32), "k": array(2, 3, 16), "v": array(2, 3, 16)}
    before = run_graph(made, given)
    assert fold_scale(made) == 1
    (node,) = made.graph
    assert node.attributes.get_float("scale") == pytest.approx(0.35)
    after = run_graph(made, given)
    for row, count in enumerate(given["counts"]):
        np.testing.assert_allclose(
            after[0][row, :count], before[0][row, :count], rtol=1e-5, atol=1e-6
        )
    assert fold_scale(made) == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("float {0.7}", "float[32] {" + ", ".join(["0.7"] * 32) + "}"),
        ("scale = 0.5", "scale = 0.0"),
        ("(s, k,", "(q, k,"),
        ("counts)\n}", "counts)\n    seen = Neg(s)\n}"),
        ("Mul(q, number)", "Mul(q, q)"),
    ],
    ids=["a number each", "the operator's own scale", "not the queries", "read twice", "a square"],
)
def test_other_products_stay(make_graph: Make, old: str, new: str) -> None:
    assert old in SCALED
    assert fold_scale(make_graph(SCALED.replace(old, new))) == 0
