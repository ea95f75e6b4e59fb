"""Attention in operators of ai.onnx against numpy, row by row, with caches that hold garbage."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.passes import standard_attention
from trtllm_lite.runtime.manifest import Phase

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]
Ops = Callable[[ir.Model], list[str]]
Array = npt.NDArray[Any]

CAPACITY, HEADS, KV_HEADS, SCALE = 32, 4, 2, 0.3
# Past tokens of three rows, and new ones, padding included, of each graph.
PAST: dict[Phase, tuple[int, ...]] = {
    "prefill": (0, 0, 0),
    "decode": (0, 7, 19),
    "extend": (3, 0, 19),
}
SEQ: dict[Phase, int] = {"prefill": 9, "decode": 1, "extend": 6}


@dataclass(frozen=True)
class Form:
    """What a layer's attention has: the size of its heads, a window, a softcap, sinks."""

    dim: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


FORMS = {
    "plain": Form(),
    "window": Form(window=4),
    "softcap": Form(softcap=2.0),
    "softcap and window": Form(softcap=2.0, window=4),
    "sinks": Form(sinks=True),
    "sinks and window": Form(sinks=True, window=4),
    "a head of 12": Form(dim=12),
    "a head of 264 in a window": Form(dim=264, window=4),
}


def graph(make_graph: Make, form: Form) -> ir.Model:
    q, k = HEADS * form.dim, KV_HEADS * form.dim
    sinks = f", float[{HEADS}] sinks" if form.sinks else ""
    cache = f"float[batch,{KV_HEADS},capacity,{form.dim}]"
    attributes = f"num_heads = {HEADS}, kv_num_heads = {KV_HEADS}, scale = {SCALE}"
    attributes += f", local_window_size = {form.window}" if form.window else ""
    attributes += f", softcap = {form.softcap}" if form.softcap else ""
    given = "sinks" if form.sinks else '""'
    made: ir.Model = make_graph(f"""agraph (int64[batch,seq] input_ids, int32[batch] past_lens,
        int32[batch] query_lens, float[batch,seq,{q}] q, float[batch,seq,{k}] k,
        float[batch,seq,{k}] v, {cache} past_key_0, {cache} past_value_0{sinks})
        => (float[batch,seq,{q}] y, {cache} present_key_0, {cache} present_value_0) {{
        total = Add(past_lens, query_lens)
        longest = ReduceMax<keepdims = 0>(total)
        minus = Constant<value = int32 {{1}}>()
        last = Sub(total, minus)
        y, present_key_0, present_value_0 = com.microsoft.GroupQueryAttention<{attributes}>
            (q, k, v, past_key_0, past_value_0, last, longest, "", "", "", "", {given},
             "", "", "", "", query_lens)
    }}""")
    for value in made.graph.outputs:
        value.shape = {v.name: v.shape for v in made.graph.inputs}[
            {"y": "q"}.get(str(value.name), str(value.name).replace("present", "past"))
        ]
    made.graph.opset_imports[""] = 24
    return made


def feeds(form: Form, phase: Phase) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    rows, seq = len(PAST[phase]), SEQ[phase]
    sizes = {
        "q": (rows, seq, HEADS * form.dim),
        "k": (rows, seq, KV_HEADS * form.dim),
        "v": (rows, seq, KV_HEADS * form.dim),
        "past_key_0": (rows, KV_HEADS, CAPACITY, form.dim),
        "past_value_0": (rows, KV_HEADS, CAPACITY, form.dim),
        "sinks": (HEADS,),
    }
    made: dict[str, Array] = {
        name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()
    }
    made["past_key_0"] *= 5
    made["input_ids"] = np.zeros((rows, seq), np.int64)
    made["past_lens"] = np.array(PAST[phase], np.int32)
    made["query_lens"] = np.full(rows, seq, np.int32)
    return made


def expected(form: Form, given: dict[str, Array], row: int) -> Array:
    """[seq, heads * dim] of one row, from its own cache and tokens."""
    past, seq, dim = int(given["past_lens"][row]), given["q"].shape[1], form.dim
    fresh = [given[n][row].reshape(seq, KV_HEADS, dim).swapaxes(0, 1) for n in ("k", "v")]
    old = [given[n][row, :, :past] for n in ("past_key_0", "past_value_0")]
    keys, values = (np.concatenate(pair, 1) for pair in zip(old, fresh, strict=True))
    queries = given["q"][row].reshape(seq, HEADS, dim)
    out = np.zeros((seq, HEADS, dim))
    for i in range(seq):
        first = max(0, past + i + 1 - form.window) if form.window else 0
        for h in range(HEADS):
            group = h // (HEADS // KV_HEADS)
            scores = keys[group, first : past + i + 1].astype(float) @ queries[i, h] * SCALE
            if form.softcap:
                scores = form.softcap * np.tanh(scores / form.softcap)
            powers = np.exp(scores)
            whole = powers.sum() + (np.exp(float(given["sinks"][h])) if form.sinks else 0.0)
            out[i, h] = powers / whole @ values[group, first : past + i + 1]
    return out.reshape(seq, HEADS * dim)


@pytest.mark.parametrize("phase", ["prefill", "decode", "extend"])
@pytest.mark.parametrize("name", FORMS)
def test_equals_numpy(name: str, phase: Phase, make_graph: Make, run_graph: Run) -> None:
    form = FORMS[name]
    made, given = graph(make_graph, form), feeds(form, phase)
    assert standard_attention(made, phase) == 1
    out, key, value = run_graph(made, given)
    for row, past in enumerate(PAST[phase]):
        np.testing.assert_allclose(out[row], expected(form, given, row), atol=2e-5)
        for got, before, fresh in ((key, "past_key_0", "k"), (value, "past_value_0", "v")):
            new = given[fresh][row].reshape(SEQ[phase], KV_HEADS, form.dim).swapaxes(0, 1)
            stop = past + SEQ[phase]
            np.testing.assert_array_equal(got[row, :, past:stop], new)
            np.testing.assert_array_equal(got[row, :, :past], given[before][row, :, :past])
            np.testing.assert_array_equal(got[row, :, stop:], given[before][row, :, stop:])


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("plain", True),
        ("window", True),
        ("softcap", False),
        ("sinks", False),
        ("a head of 12", False),
        ("a head of 264 in a window", False),
    ],
)
def test_what_has_a_kernel_is_one_node(name: str, kernel: bool, make_graph: Make, ops: Ops) -> None:
    made = graph(make_graph, FORMS[name])
    standard_attention(made, "extend")
    assert ops(made).count("Attention") == int(kernel)
    assert ops(made).count("Softmax") == int(not kernel and not FORMS[name].sinks)
    assert ops(made).count("TensorScatter") == 2


def inputs_of(made: ir.Model) -> list[str | None]:
    (node,) = [n for n in made.graph if n.op_type == "Attention"]
    assert node.name == "attention.0"
    assert node.attributes.get_float("scale") == 1.0
    return [None if v is None else v.name for v in node.inputs]


@pytest.mark.parametrize(
    ("phase", "window", "causal", "given"),
    [
        ("prefill", 0, 1, ()),
        ("decode", 0, 0, (3, "visible_lens")),
        ("extend", 0, 1, (3, "visible_lens")),
        ("decode", 4, 0, ("mask",)),
        ("prefill", 4, 0, ("mask",)),
    ],
)
def test_how_a_node_says_what_is_seen(
    phase: Phase, window: int, causal: int, given: tuple[Any, ...], make_graph: Make
) -> None:
    made = graph(make_graph, Form(window=window))
    standard_attention(made, phase)
    (node,) = [n for n in made.graph if n.op_type == "Attention"]
    assert node.attributes.get_int("is_causal") == causal
    rest = inputs_of(made)[3:]
    if given == ("mask",):
        (mask,) = node.inputs[3:]
        assert mask is not None
        assert mask.dtype == ir.DataType.BOOL
    else:
        assert rest == [None] * (given[0] if given else 0) + list(given[1:])
    sees_cache = phase != "prefill"
    key = node.inputs[1]
    assert key is not None
    assert key.is_graph_output() == sees_cache


def test_half_precision_caps_its_scores_in_float32(make_graph: Make) -> None:
    made = graph(make_graph, FORMS["softcap"])
    for value in (
        *made.graph.inputs,
        *made.graph.outputs,
        *(v for n in made.graph for v in n.outputs),
    ):
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(ir.DataType.FLOAT16)
    standard_attention(made, "decode")
    (tanh,) = [node for node in made.graph if node.op_type == "Tanh"]
    (softmax,) = [node for node in made.graph if node.op_type == "Softmax"]
    for node in (tanh, softmax):
        assert node.outputs[0].dtype == ir.DataType.FLOAT
    products = [node for node in made.graph if node.op_type == "MatMul"]
    assert {node.outputs[0].dtype for node in products} == {ir.DataType.FLOAT16}
