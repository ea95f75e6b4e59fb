"""Rotary embedding in the graph against the same inside the operator, on ragged rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.passes import fold_rotary, fuse_rotary, take_tables

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]
Ops = Callable[[ir.Model], list[str]]
Array = Callable[..., Any]

LENGTH = 24
HEADS, KV_HEADS, DIM = 4, 2, 32
# Past and new tokens of three rows, the longest reaching the last position.
PAST, COUNTS = (0, 7, 19), (5, 2, 5)

BEGIN = """agraph (int64[batch,seq] input_ids, int32[batch] past_lens, int32[batch] query_lens,
    int32[batch] context_lens, float[batch,4,seq,32] q, float[batch,2,seq,32] k,
    float[batch,seq,64] v, float[batch,2,capacity,32] pk, float[batch,2,capacity,32] pv)
    => (float[batch,seq,128] y, float[batch,2,capacity,32] k1, float[batch,2,capacity,32] v1) {
    zero = Constant<value = int64[1] {0}>()
    one = Constant<value = int64[1] {1}>()
    last = Constant<value = int64[1] {3}>()
    none = Constant<value = int64 {0}>()
    unit = Constant<value = int64 {1}>()
    big = Constant<value = int64[1] {9223372036854775807}>()
    minus = Constant<value = int32 {1}>()
    total = Add(past_lens, query_lens)
    longest = ReduceMax<keepdims = 0>(total)
    seqlens = Sub(total, minus)
    past = Cast<to = 7>(past_lens)
    begin = Unsqueeze(past, one)
    counts = Cast<to = 7>(query_lens)
    count = Unsqueeze(counts, one)
    end = Add(begin, count)
    clamp = Sub(end, unit)
    seq = Shape<start = 1, end = 2>(input_ids)
    size = Squeeze(seq)
    steps = Range(none, size, unit)
    row = Unsqueeze(steps, zero)
    all = Add(begin, row)
    positions = Min(all, clamp)
    three = Constant<value = int64[1] {2}>()
    column = Unsqueeze(positions, three)
    number = Cast<to = 1>(column)
"""
ANGLES = """    angles = Mul(number, freq)
    both = PAIRS
    c = Cos(both)
    s = Sin(both)
    cos = Unsqueeze(c, one)
    sin = Unsqueeze(s, one)
"""
HALVES = "Concat<axis = -1>(angles, angles)"
NEIGHBOURS = """Reshape(twice, flat)
    deep = Unsqueeze(angles, last)
    twice = Concat<axis = -1>(deep, deep)"""
TURN_HALVES = """    xxh = Slice(SOURCE, middle, big, last)
    xxn = Neg(xxh)
    xxl = Slice(SOURCE, zero, middle, last)
    xxt = Concat<axis = -1>(xxn, xxl)
"""
TURN_NEIGHBOURS = """    xxh = Slice(SOURCE, one, big, last, pair)
    xxn = Neg(xxh)
    xxo = Unsqueeze(xxn, four)
    xxl = Slice(SOURCE, zero, big, last, pair)
    xxe = Unsqueeze(xxl, four)
    xxp = Concat<axis = -1>(xxo, xxe)
    xxt = Reshape(xxp, joinedHEADS)
"""
ROTATE = """    xxa = Mul(SOURCE, COS)
    xxb = Mul(xxt, SIN)
    xxR = Add(xxa, xxb)
"""
END = """
    qt = Transpose<perm = [0, 2, 1, 3]>(q_rotated)
    kt = Transpose<perm = [0, 2, 1, 3]>(k_rotated)
    qshape = Constant<value = int64[3] {0, 0, 128}>()
    kshape = Constant<value = int64[3] {0, 0, 64}>()
    qf = Reshape(qt, qshape)
    kf = Reshape(kt, kshape)
    y, k1, v1 = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 0>
        (qf, kf, v, pk, pv, seqlens, longest, , , , , , , , , , query_lens)
}"""


def rotated(name: str, dims: int, *, interleaved: bool, cos: str = "cos", sin: str = "sin") -> str:
    """The nodes that make NAME_rotated, on the first `dims` elements of each head."""
    whole = dims == DIM
    text = (TURN_NEIGHBOURS if interleaved else TURN_HALVES) + ROTATE
    if not whole:
        text = f"""    xxfirst = Slice({name}, zero, width, last)
    xxrest = Slice({name}, width, big, last)
{text}    xxall = Concat<axis = -1>(xxR, xxrest)
"""
    source = name if whole else "xxfirst"
    text = text.replace("SOURCE", source).replace("COS", cos).replace("SIN", sin)
    text = text.replace("xxR" if whole else "xxall", f"{name}_rotated")
    return text.replace("xx", f"{name}_").replace("HEADS", name)


def build(
    make_graph: Make,
    dims: int = DIM,
    *,
    interleaved: bool = False,
    q: str | None = None,
    k: str | None = None,
    angles: str = ANGLES,
) -> ir.Model:
    numbers = {
        "middle": [dims // 2],
        "width": [dims],
        "pair": [2],
        "four": [4],
        "flat": [0, 0, dims],
        "joinedq": [0, HEADS, 0, dims],
        "joinedk": [0, KV_HEADS, 0, dims],
    }
    constants = "".join(
        f"    {name} = Constant<value = int64[{len(v)}] {{{', '.join(map(str, v))}}}>()\n"
        for name, v in numbers.items()
    )
    freq = 100.0 ** (-np.arange(dims // 2) / dims)
    values = ", ".join(f"{x:.9g}" for x in freq)
    constants += f"    freq = Constant<value = float[{dims // 2}] {{{values}}}>()\n"
    if interleaved:
        lines = NEIGHBOURS.split("\n")
        pairs = "\n".join([*lines[1:], f"    both = {lines[0]}"]).lstrip()
        angles = angles.replace("both = PAIRS", pairs)
    made = make_graph(
        BEGIN
        + constants
        + angles.replace("PAIRS", HALVES)
        + (q or rotated("q", dims, interleaved=interleaved))
        + (k or rotated("k", dims, interleaved=interleaved))
        + END
    )
    positions = next(v for n in made.graph for v in n.outputs if v.name == "positions")
    # The tracer knows that the range is as long as the tokens.
    positions.shape = ir.Shape(["batch", "seq"])
    return made


def feeds(array: Array) -> dict[str, Any]:
    rows, seq = len(PAST), max(COUNTS)
    past, counts = np.array(PAST, np.int32), np.array(COUNTS, np.int32)
    return {
        "input_ids": np.zeros((rows, seq), np.int64),
        "past_lens": past,
        "query_lens": counts,
        "context_lens": past + counts,
        "q": array(rows, HEADS, seq, DIM),
        "k": array(rows, KV_HEADS, seq, DIM),
        "v": array(rows, seq, KV_HEADS * DIM),
        "pk": array(rows, KV_HEADS, LENGTH, DIM),
        "pv": array(rows, KV_HEADS, LENGTH, DIM),
    }


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dims", [DIM, DIM // 2], ids=["whole head", "half of the head"])
def test_rotary_goes_into_the_attention(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array, dims: int, interleaved: bool
) -> None:
    made, given = build(make_graph, dims, interleaved=interleaved), feeds(array)
    before = run_graph(made, given)
    assert fold_rotary(made, LENGTH) == 1
    assert not {"Cos", "Sin", "Neg", "Concat", "Min", "Range"} & set(ops(made))
    tables = {n: v for n, v in made.graph.initializers.items() if n.startswith("rotary.")}
    assert {tuple(v.shape.numpy()) for v in tables.values() if v.shape} == {(LENGTH, dims // 2)}
    after = run_graph(made, given)
    for row, (past, count) in enumerate(zip(PAST, COUNTS, strict=True)):
        np.testing.assert_allclose(
            after[0][row, :count], before[0][row, :count], rtol=1e-5, atol=1e-6
        )
        written = slice(past, past + count)
        np.testing.assert_allclose(
            after[1][row, :, written], before[1][row, :, written], rtol=1e-5, atol=1e-6
        )
    assert fold_rotary(made, LENGTH) == 0


def test_tables_are_what_the_graph_computes(make_graph: Make) -> None:
    made = build(make_graph)
    fold_rotary(made, LENGTH)
    taken = take_tables(made)
    assert set(taken) == {"rotary.0.cos", "rotary.0.sin"}
    angles = np.arange(LENGTH)[:, None] * 100.0 ** (-np.arange(DIM // 2) / DIM)[None]
    np.testing.assert_allclose(taken["rotary.0.cos"], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(taken["rotary.0.sin"], np.sin(angles), atol=1e-5)
    assert all(made.graph.initializers[name].const_value is None for name in taken)
    assert take_tables(made) == {}


PLAIN = rotated("q", DIM, interleaved=False)
BY_CONTEXT = ANGLES.replace(
    "angles = Mul(number, freq)",
    """ends = Constant<value = int64[2] {1, 2}>()
    longer = Cast<to = 1>(context_lens)
    far = Unsqueeze(longer, ends)
    scaled = Div(number, far)
    angles = Mul(scaled, freq)""",
)
UNEQUAL = ANGLES.replace("PAIRS", "Concat<axis = -1>(angles, more)").replace(
    "both =", "more = Add(angles, angles)\n    both ="
)
WRONG: dict[str, dict[str, Any]] = {
    "queries only": {"k": "    k_rotated = Identity(k)\n"},
    "the other way round": {"q": PLAIN.replace("(q_n, q_l)", "(q_l, q_n)")},
    "no turn": {"q": PLAIN.replace("Neg(", "Abs(")},
    "unequal halves": {"q": PLAIN.replace("q, middle, big", "q, one, middle")},
    "keys by another angle": {"k": rotated("k", DIM, interleaved=False, cos="sin")},
    "angles that depend on the row's length": {"angles": BY_CONTEXT},
    "another angle for each of a pair": {"angles": UNEQUAL},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_rotation_by_position_stays(
    make_graph: Make, ops: Ops, change: dict[str, Any]
) -> None:
    made = build(make_graph, **change)
    before = ops(made)
    assert fold_rotary(made, LENGTH) == 0
    assert ops(made) == before


def test_a_width_that_the_kernel_refuses_stays(make_graph: Make) -> None:
    """Eight angles and no less: the operator's own condition."""
    assert fold_rotary(build(make_graph, 8), LENGTH) == 0
    assert fold_rotary(build(make_graph, 16), LENGTH) == 1


def test_a_head_that_the_kernel_refuses_stays(make_graph: Make, run_graph: Run) -> None:
    """Of 40 elements, of which 16 are rotated: the operator takes multiples of 16."""
    wider = {",32]": ",40]", ",64] v": ",80] v", ",128] y": ",160] y"}
    wider |= {"{0, 0, 128}": "{0, 0, 160}", "{0, 0, 64}": "{0, 0, 80}", "seq,32]": "seq,40]"}

    def made(text: str) -> ir.Model:
        for old, new in wider.items():
            text = text.replace(old, new)
        model: ir.Model = make_graph(text)
        return model

    model, rng = build(made, 16), np.random.default_rng(0)
    small = {"input_ids": np.zeros((1, 3), np.int64), "past_lens": np.array([2], np.int32)}
    small |= {n: np.array([3], np.int32) for n in ("query_lens", "context_lens")}
    sizes = {"q": (1, HEADS, 3, 40), "k": (1, KV_HEADS, 3, 40), "v": (1, 3, 80)}
    sizes |= dict.fromkeys(("pk", "pv"), (1, KV_HEADS, 8, 40))
    small |= {n: rng.standard_normal(s).astype(np.float32) for n, s in sizes.items()}
    before = run_graph(model, small)
    assert (fold_rotary(model, LENGTH), fuse_rotary(model, LENGTH)) == (0, 1)
    for old, new in zip(before, run_graph(model, small), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-5)


# fuse_rotary

LIMIT = 12
BY_CHOICE = ANGLES.replace(
    "angles = Mul(number, freq)",
    f"""limit = Constant<value = int32 {{{LIMIT}}}>()
    ends = Constant<value = int64[2] {{1, 2}}>()
    half = Constant<value = float {{0.5}}>()
    longer = Greater(context_lens, limit)
    far = Unsqueeze(longer, ends)
    fast = Mul(number, freq)
    slow = Mul(fast, half)
    angles = Where(far, slow, fast)""",
)


def test_a_row_chooses_its_angles(make_graph: Make, run_graph: Run, ops: Ops, array: Array) -> None:
    """One row below the limit, one at it, and one beyond, in one batch."""
    made = build(make_graph, DIM // 2, angles=BY_CHOICE)
    given = feeds(array) | {"context_lens": np.array([5, LIMIT, LENGTH], np.int32)}
    before = run_graph(made, given)
    assert fold_rotary(made, LENGTH) == 0
    assert fuse_rotary(made, LENGTH) == 1
    assert ops(made).count("RotaryEmbedding") == 2
    assert not {"Cos", "Sin", "Neg", "Concat", "Where"} & set(ops(made))
    taken = take_tables(made.clone())
    assert {n: t.shape for n, t in taken.items()} == dict.fromkeys(
        ("rotary.rows.0.cos", "rotary.rows.0.sin"), (LIMIT + LENGTH, DIM // 4)
    )
    _same(run_graph(made, given), before)
    assert fuse_rotary(made, LENGTH) == 0


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_angles_that_the_attention_does_not_take(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array, interleaved: bool
) -> None:
    made, given = build(make_graph, 12, interleaved=interleaved), feeds(array)
    before = run_graph(made, given)
    assert (fold_rotary(made, LENGTH), fuse_rotary(made, LENGTH)) == (0, 1)
    assert ops(made).count("RotaryEmbedding") == 2
    _same(run_graph(made, given), before)


def test_a_choice_that_is_never_made(make_graph: Make, run_graph: Run, array: Array) -> None:
    """Sequences that end before the limit."""
    made, given = build(make_graph, angles=BY_CHOICE), feeds(array)
    given |= {"context_lens": np.array([5, 9, LIMIT], np.int32)}
    given["past_lens"] = np.array([0, 7, LIMIT - 5], np.int32)
    before = run_graph(made, given)
    assert fuse_rotary(made, LIMIT) == 1
    _same(run_graph(made, given), before, given["past_lens"])


NO_CHOICE = {
    "by length itself": BY_CONTEXT,
    "falling": BY_CHOICE.replace("Greater", "Less"),
    "two": BY_CHOICE.replace(
        "far = Unsqueeze(longer, ends)",
        "odd = Less(query_lens, limit)\n    both2 = Unsqueeze(odd, ends)\n"
        "    first = Unsqueeze(longer, ends)\n    far = And(first, both2)",
    ),
}


@pytest.mark.parametrize("angles", NO_CHOICE.values(), ids=NO_CHOICE.keys())
def test_other_choices_stay(make_graph: Make, ops: Ops, angles: str) -> None:
    made = build(make_graph, angles=angles)
    before = ops(made)
    assert fuse_rotary(made, LENGTH) == 0
    assert ops(made) == before


def _same(after: list[Any], before: list[Any], past_lens: Any = PAST) -> None:
    """Results and the cache's new rows, of the tokens that there are."""
    for row, (past, count) in enumerate(zip(past_lens, COUNTS, strict=True)):
        np.testing.assert_allclose(
            after[0][row, :count], before[0][row, :count], rtol=1e-5, atol=1e-6
        )
        written = slice(past, past + count)
        np.testing.assert_allclose(
            after[1][row, :, written], before[1][row, :, written], rtol=1e-5, atol=1e-6
        )
