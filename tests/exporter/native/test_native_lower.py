"""Which nodes of a float graph become operators of our own, and which stay."""

from collections import Counter
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
import pytest

from trtllm_lite.exporter.native.lower import NativeGraph, lower_native
from trtllm_lite.exporter.quantize.plan import FormatPlan, Linear, plan_formats
from trtllm_lite.exporter.quantize.rewrite import find_linears
from trtllm_lite.runtime.native_layout import Packing

INT8 = "int8_block64"


def lowered(graphs: Any, plan: FormatPlan | None = None) -> NativeGraph:
    weights = find_linears(graphs.models)
    made = lower_native(graphs.models[-1], plan or plan_formats("int8", weights), weights)
    assert made is not None
    return made


def ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_counts_are_those_of_the_configuration(family: Any) -> None:
    layers = family.layers
    native = lowered(family.graphs)
    counts = {"gather": 1, "linear": 4 * layers + 1, "gated": layers}
    if family.name != "qwen2":
        counts["attention"] = layers
    assert native.counts == counts
    found = ops(native.model)
    assert found["BlockLinear"] == 4 * layers + 1
    assert found["BlockGather"] == 1
    assert found["Attention"] == counts.get("attention", 0)
    assert found["GroupQueryAttention"] == layers - found["Attention"]
    assert not found.keys() & {"FusedMatMul", "MatMul", "Gather", "QuickGelu", "Gelu"}
    if family.name != "qwen2":  # there the projections' heads are taken apart
        assert "Split" not in found
    given = {f"native.{name}": n for name, n in counts.items()}
    assert {n: c for n, c in family.report.counts.items() if n.startswith("native.")} == given


def test_the_float_graph_stays_as_it_is(family: Any) -> None:
    model = family.graphs.models[-1]
    before = ops(model)
    assert lowered(family.graphs).model is not model
    assert ops(model) == before
    assert "BlockLinear" not in before


def test_inputs_and_outputs_are_those_of_the_phases(family: Any) -> None:
    graph = lowered(family.graphs).model.graph
    for spec in family.graphs.specs:
        assert [v.name for v in graph.inputs] == [t.name for t in spec.inputs]
        assert [v.name for v in graph.outputs] == [t.name for t in spec.outputs]


def test_packings_are_those_of_the_weights(family: Any) -> None:
    native = lowered(family.graphs)
    weights = {w.name: w for w in find_linears(family.graphs.models)}
    assert native.packings.keys() == weights.keys()
    gated = {n for n, p in native.packings.items() if p.gated}
    assert len(gated) == family.layers
    assert all("gate_proj" in name for name in gated)
    for name, packing in native.packings.items():
        w = weights[name]
        kind = family.formats[name]
        assert packing == Packing(w.rows, w.columns, kind.bits, kind.block, name in gated)
        values = native.model.graph.initializers
        assert tuple(values[f"{name}.codes"].shape or ()) == packing.codes_shape
        assert tuple(values[f"{name}.scale"].shape or ()) == packing.scale_shape
        assert name not in values, "the float weight must not be written a second time"


def test_activations_are_the_models(family: Any) -> None:
    wanted = {"llama": 1, "gemma2": 2, "qwen2": 1}[family.name]
    nodes = [n for n in lowered(family.graphs).model.graph if n.op_type == "BlockLinear"]
    assert Counter(n.attributes.get_int("activation") for n in nodes) == {
        wanted: family.layers,
        0: 3 * family.layers + 1,
    }


def test_attention_keeps_its_meaning(family: Any) -> None:
    """Inputs stand where they stood, and every attribute is said."""
    old = [n for n in family.graphs.models[-1].graph if n.op_type == "GroupQueryAttention"]
    new = [n for n in lowered(family.graphs).model.graph if n.op_type == "Attention"]
    for before, after in zip(old, new, strict=False):
        assert [v and v.name for v in before.inputs] == [v and v.name for v in after.inputs]
        assert [v.name for v in before.outputs] == [v.name for v in after.outputs]
        window = before.attributes.get_int("local_window_size", -1)
        assert after.attributes.get_int("local_window_size") == window
        for name, default in (("scale", None), ("softcap", 0.0)):
            assert after.attributes.get_float(name) == before.attributes.get_float(name, default)
    if family.name == "gemma2":
        assert {n.attributes.get_int("local_window_size") for n in new} == {-1, 8}


def test_tied_weights_are_packed_once(family: Any) -> None:
    native = lowered(family.graphs)
    codes = [
        str(n.inputs[1].name)
        for n in native.model.graph
        if n.op_type in ("BlockLinear", "BlockGather") and n.inputs[1] is not None
    ]
    tied = len(codes) - len(set(codes))
    assert tied == (0 if family.name == "qwen2" else 1)


def test_without_a_format_there_is_no_graph(family: Any) -> None:
    weights = find_linears(family.graphs.models)
    assert lower_native(family.graphs.models[-1], FormatPlan(), weights) is None
    rounded = FormatPlan(prefill="w8a8", decode="w8a8")
    assert lower_native(family.graphs.models[-1], rounded, weights) is None


# Graphs from text: what is taken for a gate, and which attention the kernel computes

HEAD = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
WIDE = Linear("w", 12, 8, ("w",))


def graph(body: str, out: str = "float[b, s, 6] y") -> ir.Model:
    """`h` is x [b, s, 8] times w [12, 8]."""
    text = f"""{HEAD} agraph (float[b, s, 8] x, float[12, 8] w) => ({out}) {{
        h = com.microsoft.FusedMatMul <transB = 1> (x, w)
        {body}
    }}"""
    model = ir.from_onnx_text(text)
    common.ShapeInferencePass()(model)
    for value in model.graph.all_nodes():
        for output in value.outputs:
            if output.name in ("g", "u", "j", "l") and output.shape is None:
                output.shape = ir.Shape(["b", "s", 6])
    weight = model.graph.inputs.pop()
    model.graph.initializers["w"] = weight
    return model


GATE = """g, u = Split <axis = -1, num_outputs = 2> (h)
a = com.microsoft.QuickGelu <alpha = 1.0> (g)
y = Mul (a, u)"""


def native_of(model: ir.Model) -> NativeGraph:
    made = lower_native(model, FormatPlan(decode=INT8), [WIDE])
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("body", "activation"),
    [
        (GATE, 1),
        (GATE.replace("Mul (a, u)", "Mul (u, a)"), 1),
        (GATE.replace("axis = -1", "axis = 2"), 1),
        (GATE.replace("com.microsoft.QuickGelu <alpha = 1.0>", 'Gelu <approximate = "tanh">'), 2),
    ],
)
def test_gates(body: str, activation: int) -> None:
    native = native_of(graph(body))
    assert native.counts == {"linear": 1, "gated": 1}
    (node,) = native.model.graph
    assert node.attributes.get_int("activation") == activation
    assert node.outputs[0].name == "y"
    assert native.packings["w"] == Packing(12, 8, 8, 64, gated=True)


@pytest.mark.parametrize(
    "body",
    [
        GATE.replace("alpha = 1.0", "alpha = 1.702"),
        GATE.replace("com.microsoft.QuickGelu <alpha = 1.0>", "Gelu"),
        GATE.replace("com.microsoft.QuickGelu <alpha = 1.0>", "Sigmoid"),
        GATE.replace("Mul (a, u)", "Mul (a, a)\n z = Neg (u)"),
        GATE.replace("Mul (a, u)", "Add (a, u)"),
        GATE.replace("y = Mul (a, u)", "z = Neg (u)\ny = Mul (a, z)"),
        GATE.replace("y = Mul (a, u)", "m = Mul (a, u)\ny = Add (m, u)"),
        GATE.replace("y = Mul (a, u)", "m = Mul (a, u)\ny = Add (m, g)"),
        GATE.replace("y = Mul (a, u)", "m = Mul (a, u)\ny = Add (m, a)"),
        "b = Neg (h)\n" + GATE.replace("(h)", "(b)", 1),
    ],
)
def test_what_is_no_gate(body: str) -> None:
    native = native_of(graph(body))
    assert native.counts == {"linear": 1}
    assert native.model.graph[0].attributes.get_int("activation") == 0
    assert not native.packings["w"].gated
    assert len(native.model.graph) == len(graph(body).graph)


def test_unequal_halves_are_no_gate() -> None:
    body = """sizes = Constant <value_ints = [4, 8]> ()
    g, u = Split <axis = -1> (h, sizes)
    a = com.microsoft.QuickGelu <alpha = 1.0> (g)
    b = ReduceSum <keepdims = 1> (a)
    y = Mul (b, u)"""
    assert native_of(graph(body, "float[b, s, 8] y")).counts == {"linear": 1}


def attention(dim: int = 16, kind: str = "float", more: str = "", extra: str = "") -> ir.Model:
    """A projection, and an attention of two heads on it."""
    cache = f"{kind}[b, 2, cap, {dim}]"
    text = f"""{HEAD} agraph (float[b, s, 8] x, {cache} pk, {cache} pv, int32[b] last,
        int32 total, float[b, 1, s, cap] bias, float[2] sink, float[12, 8] w)
        => (float[b, s, n] y, {cache} k, {cache} v, float[b, s, 12] h) {{
        h = com.microsoft.FusedMatMul <transB = 1> (x, w)
        y, k, v = com.microsoft.GroupQueryAttention
            <num_heads = 2, kv_num_heads = 2, scale = 0.25 {more}>
            (x, , , pk, pv, last, total {extra})
    }}"""
    model = ir.from_onnx_text(text)
    model.graph.initializers["w"] = model.graph.inputs.pop()
    return model


@pytest.mark.parametrize(
    "model",
    [
        attention(),
        attention(256),
        attention(more=", softcap = 3.0, local_window_size = 7, do_rotary = 1"),
        attention(extra=", , , , , sink"),
    ],
)
def test_attention_that_fits(model: ir.Model) -> None:
    native = native_of(model)
    assert native.counts["attention"] == 1
    assert ops(native.model)["GroupQueryAttention"] == 0


@pytest.mark.parametrize(
    "model",
    [
        attention(24),
        attention(8),
        attention(kind="float16"),
        attention(extra=", , , , bias"),
        attention(more=", smooth_softmax = 1"),
        attention(more=', k_quant_type = "PER_TENSOR"'),
    ],
)
def test_attention_that_stays(model: ir.Model) -> None:
    native = native_of(model)
    assert "attention" not in native.counts
    assert ops(native.model)["GroupQueryAttention"] == 1


@pytest.mark.parametrize("format_name", ["int4_block32", "int4_block64"])
def test_four_bits_have_zero_points(format_name: str) -> None:
    made = lower_native(
        graph("y = Neg (h)", "float[b, s, 12] y"), FormatPlan(decode=format_name), [WIDE]
    )
    assert made is not None
    packing = made.packings["w"]
    assert (packing.bits, packing.block) == (4, int(format_name[-2:]))
    values = made.model.graph.initializers
    assert tuple(values["w.zero"].shape or ()) == packing.zero_shape
    assert (values["w.scale"].dtype, values["w.zero"].dtype) == (
        ir.DataType.UINT16,
        ir.DataType.UINT8,
    )
    node = made.model.graph[0]
    assert [v and v.name for v in node.inputs] == ["x", "w.codes", "w.scale", "w.zero"]


@pytest.mark.parametrize("gated_first", [True, False])
def test_a_weight_with_and_without_a_gate_is_packed_without(gated_first: bool) -> None:
    plain = "i = com.microsoft.FusedMatMul <transB = 1> (v, w)\nz = Neg (i)"
    parts = ["v = Identity (x)", *([GATE, plain] if gated_first else [plain, GATE])]
    native = native_of(graph("\n".join(parts), "float[b, s, 6] y, float[b, s, 12] z"))
    assert native.counts == {"linear": 2}
    assert native.packings == {"w": Packing(12, 8, 8, 64)}
    nodes = [n for n in native.model.graph if n.op_type == "BlockLinear"]
    assert [n.attributes.get_int("activation") for n in nodes] == [0, 0]
    assert ops(native.model)["Split"] == 1


def test_a_weight_behind_two_gates_is_packed_once() -> None:
    second = """j, l = Split <axis = -1, num_outputs = 2> (i)
m = Gelu <approximate = "tanh"> (j)
z = Mul (m, l)"""
    body = f"{GATE}\nv = Identity (x)\ni = com.microsoft.FusedMatMul <transB = 1> (v, w)\n{second}"
    native = native_of(graph(body, "float[b, s, 6] y, float[b, s, 6] z"))
    assert native.counts == {"linear": 2, "gated": 2}
    assert native.packings == {"w": Packing(12, 8, 8, 64, gated=True)}
    nodes = [n for n in native.model.graph if n.op_type == "BlockLinear"]
    assert sorted(n.attributes.get_int("activation") for n in nodes) == [1, 2]


def test_a_spared_weight_keeps_its_own_format() -> None:
    plan = FormatPlan(prefill="w8a8", decode="int4_block32", overrides={"w": INT8})
    made = lower_native(graph("y = Neg (h)", "float[b, s, 12] y"), plan, [WIDE])
    assert made is not None
    assert made.packings["w"] == Packing(12, 8, 8, 64)
