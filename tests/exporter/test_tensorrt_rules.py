"""The rules for TensorRT: graphs that were lowered for it keep them all, and each has a graph that
breaks it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.families import BASE
from trtllm_lite.exporter.graphs import Graphs, build_graphs
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.passes.place import Place
from trtllm_lite.exporter.quantize.apply import prepare
from trtllm_lite.exporter.tensorrt_rules import RULES, check_graph, violations
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.progress import NoProgress

Break = Callable[[ir.Model], None]
HALF, INT32, INT64 = ir.DataType.FLOAT16, ir.DataType.INT32, ir.DataType.INT64


@pytest.fixture(scope="module")
def lowered() -> Graphs:
    """A tiny Llama for TensorRT, in float16 with a layer in int8."""
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", **{**BASE, "num_hidden_layers": 1})
    graphs = build_graphs(config, find_target("tensorrt"), 64, NoProgress(), "float16")
    return prepare(graphs, "int8", "float16").graphs


@pytest.fixture
def of_phase(lowered: Graphs) -> Callable[[str], ir.Model]:
    """A copy of one of its graphs, which the test may change."""
    by_phase: dict[str, ir.Model] = {
        s.phase: m for s, m in zip(lowered.specs, lowered.models, strict=True)
    }
    return lambda phase: by_phase[phase].clone()


def nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def first(model: ir.Model, op_type: str) -> ir.Node:
    return nodes(model, op_type)[0]


def attention(model: ir.Model) -> ir.Node:
    return first(model, "Attention")


def retyped(value: ir.Value | None, dtype: ir.DataType) -> None:
    assert value is not None
    value.type = ir.TensorType(dtype)


def set_int(op_type: str, name: str, number: int) -> Break:
    def change(model: ir.Model) -> None:
        first(model, op_type).attributes[name] = ir.AttrInt64(name, number)

    return change


def set_float(op_type: str, name: str, number: float) -> Break:
    def change(model: ir.Model) -> None:
        first(model, op_type).attributes[name] = ir.AttrFloat32(name, number)

    return change


def give(op_type: str, index: int, name: str, dtype: ir.DataType) -> Break:
    """A new graph input as the input of a node at `index`."""

    def change(model: ir.Model) -> None:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(["batch"]))
        model.graph.inputs.append(value)
        node = first(model, op_type)
        if len(node.inputs) <= index:
            node.resize_inputs(index + 1)
        node.replace_input_with(index, value)

    return change


def take_away(op_type: str, index: int) -> Break:
    return lambda model: first(model, op_type).replace_input_with(index, None)


def unary(op_type: str, domain: str = "") -> Break:
    """Another node behind the sigmoid."""

    def change(model: ir.Model) -> None:
        node = first(model, "Sigmoid")
        new = ir.node(op_type, [node.outputs[0]], domain=domain)
        model.graph.insert_after(node, new)
        node.outputs[0].replace_all_uses_with(new.outputs[0])
        new.replace_input_with(0, node.outputs[0])

    return change


def wrong_opset(model: ir.Model) -> None:
    model.graph.opset_imports[""] = 23


def function(model: ir.Model) -> None:
    inner = ir.Graph([], [], nodes=[], opset_imports={"": 24})
    made = ir.Function("local", "f", graph=inner, attributes=[])
    model.functions[made.identifier()] = made


def unread_input(model: ir.Model) -> None:
    kind = ir.TensorType(INT64)
    model.graph.inputs.append(ir.Value(name="more", type=kind, shape=ir.Shape(["batch"])))


def half_logits(model: ir.Model) -> None:
    retyped(next(v for v in model.graph.outputs if v.name == "logits"), HALF)


def two_outputs(model: ir.Model) -> None:
    attention(model).resize_outputs(2)


def precision(model: ir.Model) -> None:
    node = attention(model)
    node.attributes["softmax_precision"] = ir.AttrInt64("softmax_precision", 1)


def packed_query(model: ir.Model) -> None:
    query = attention(model).inputs[0]
    assert query is not None
    query.shape = ir.Shape(["batch", "seq", 64])


def wide_values(model: ir.Model) -> None:
    node = attention(model)
    wide = Place(node).op("Cast", node.inputs[2], dtype=ir.DataType.FLOAT, to=ir.DataType.FLOAT)
    wide.shape = node.inputs[2].shape if node.inputs[2] is not None else None
    node.replace_input_with(2, wide)


def cached_keys(model: ir.Model) -> None:
    """In another shape, which hides where they come from."""
    node = attention(model)
    scatter = first(model, "TensorScatter")
    apart = Place(node).op("Identity", scatter.outputs[0], shape=("batch", 2, "capacity", 16))
    node.replace_input_with(1, apart)


def hidden_cache(model: ir.Model) -> None:
    node = attention(model)
    node.resize_inputs(3)
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    for index, scatter in enumerate(nodes(model, "TensorScatter")[:2]):
        apart = Place(node).op("Identity", scatter.outputs[0], shape=("batch", 2, "capacity", 16))
        node.replace_input_with(index + 1, apart)


def double_inside(model: ir.Model) -> None:
    node = first(model, "Sigmoid")
    wide = Place(node).op("Cast", node.inputs[0], dtype=ir.DataType.DOUBLE, to=ir.DataType.DOUBLE)
    back = Place(node).op("Cast", wide, dtype=HALF, to=HALF)
    node.replace_input_with(0, back)


def unnumbered_heads(model: ir.Model) -> None:
    del first(model, "RotaryEmbedding").attributes["num_heads"]


def small_heads(model: ir.Model) -> None:
    query = attention(model).inputs[0]
    assert query is not None
    query.shape = ir.Shape(["batch", 4, "seq", 12])


def mask_of(dtype: ir.DataType, *, keep_lengths: bool = False) -> Break:
    def change(model: ir.Model) -> None:
        node = attention(model)
        if not keep_lengths:
            node.resize_inputs(4)
        else:
            node.resize_inputs(7)
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
        give("Attention", 3, "mask", dtype)(model)

    return change


def causal_mask(model: ir.Model) -> None:
    mask_of(ir.DataType.BOOL)(model)
    set_int("Attention", "is_causal", 1)(model)


def without_lengths(model: ir.Model) -> None:
    attention(model).resize_inputs(3)


def fresh_lengths(model: ir.Model) -> None:
    give("Attention", 6, "lens", INT64)(model)


def circular(model: ir.Model) -> None:
    first(model, "TensorScatter").attributes["mode"] = ir.AttrString("mode", "circular")


def flat_cache(model: ir.Model) -> None:
    cache = first(model, "TensorScatter").inputs[0]
    assert cache is not None
    cache.shape = ir.Shape(["batch", "capacity", 32])


def int8_cache(model: ir.Model) -> None:
    retyped(first(model, "TensorScatter").inputs[0], ir.DataType.INT8)


def copied_cache(model: ir.Model) -> None:
    node = first(model, "TensorScatter")
    copy = Place(node).op("Identity", node.inputs[0], shape=("batch", 2, "capacity", 16))
    node.replace_input_with(0, copy)


def inner_cache(model: ir.Model) -> None:
    present = first(model, "TensorScatter").outputs[0]
    model.graph.outputs.remove(present)


def read_cache(model: ir.Model) -> None:
    node = first(model, "TensorScatter")
    model.graph.insert_before(node, ir.node("Neg", [node.inputs[0]]))


def narrow_indices(model: ir.Model) -> None:
    retyped(first(model, "TensorScatter").inputs[2], INT32)


def swapped_caches(model: ir.Model) -> None:
    key, value = nodes(model, "TensorScatter")[:2]
    old = key.inputs[0], value.inputs[0]
    key.replace_input_with(0, old[1])
    value.replace_input_with(0, old[0])


def unsigned(model: ir.Model) -> None:
    retyped(first(model, "DequantizeLinear").inputs[0], ir.DataType.UINT4)


def zero_point(model: ir.Model) -> None:
    node = first(model, "DequantizeLinear")
    node.resize_inputs(3)
    node.replace_input_with(2, node.inputs[0])


def computed_weight(model: ir.Model) -> None:
    node = first(model, "DequantizeLinear")
    size = np.array(node.inputs[0].shape).tolist() if node.inputs[0] is not None else []
    copy = Place(node).op("Identity", node.inputs[0], shape=tuple(size))
    node.replace_input_with(0, copy)


def short_scales(model: ir.Model) -> None:
    scale = first(model, "DequantizeLinear").inputs[1]
    assert scale is not None
    scale.shape = ir.Shape([1, *(scale.shape or ())[1:]])


BOOL = ir.DataType.BOOL
# Rule -> the graph that is changed, the change, and the rules besides it that see the same.
BROKEN: dict[str, tuple[str, Break, set[str]]] = {
    "opset": ("decode", wrong_opset, set()),
    "domain": ("decode", unary("QuickGelu", "com.microsoft"), set()),
    "function": ("decode", function, set()),
    "plugin": ("decode", unary("TRT_Attention"), set()),
    "operator": ("decode", unary("MatMulInteger"), set()),
    "rotary_heads": ("decode", unnumbered_heads, set()),
    "unused_input": ("decode", unread_input, set()),
    "logits": ("decode", half_logits, set()),
    "attention_past": ("prefill", give("Attention", 4, "past", HALF), set()),
    "attention_outputs": ("decode", two_outputs, set()),
    "attention_softcap": ("decode", set_float("Attention", "softcap", 5.0), set()),
    "attention_precision": ("decode", precision, set()),
    "attention_scale": ("decode", set_float("Attention", "scale", 0.25), set()),
    "attention_rank": ("prefill", packed_query, set()),
    "attention_types": ("prefill", wide_values, set()),
    "attention_pair": ("prefill", cached_keys, {"attention_unbounded"}),
    "attention_head_size": ("prefill", small_heads, set()),
    "attention_mask_type": ("prefill", mask_of(HALF), set()),
    "attention_causal_mask": ("prefill", causal_mask, set()),
    "attention_lengths_and_mask": ("decode", mask_of(BOOL, keep_lengths=True), set()),
    "attention_unbounded": ("decode", without_lengths, set()),
    "attention_fresh_lengths": ("prefill", fresh_lengths, set()),
    "attention_alignment": ("extend", set_int("Attention", "is_causal", 0), set()),
    "attention_future": ("prefill", set_int("Attention", "is_causal", 0), set()),
    "cache_mode": ("decode", circular, set()),
    "cache_axis": ("decode", set_int("TensorScatter", "axis", 1), set()),
    "cache_rank": ("decode", flat_cache, set()),
    "cache_type": ("decode", int8_cache, set()),
    "cache_source": ("decode", copied_cache, {"cache_pairs"}),
    "cache_sink": ("decode", inner_cache, {"cache_pairs"}),
    "cache_readers": ("decode", read_cache, set()),
    "cache_indices": ("decode", narrow_indices, set()),
    "cache_pairs": ("decode", swapped_caches, set()),
    "element_type": ("decode", unsigned, {"quantized_weight"}),
    "zero_point": ("decode", zero_point, set()),
    "quantized_weight": ("decode", computed_weight, set()),
    "weight_blocks": ("decode", short_scales, set()),
}


@pytest.mark.parametrize("phase", ["prefill", "decode", "extend"])
def test_lowered_graphs_keep_them(phase: str, of_phase: Callable[[str], ir.Model]) -> None:
    model = of_phase(phase)
    assert violations(model) == ()
    assert nodes(model, "DequantizeLinear")
    assert nodes(model, "Attention")


def test_each_rule_has_a_graph_that_breaks_it() -> None:
    assert list(BROKEN) == list(RULES)


@pytest.mark.parametrize("rule", BROKEN)
def test_broken(rule: str, of_phase: Callable[[str], ir.Model]) -> None:
    phase, change, others = BROKEN[rule]
    model = of_phase(phase)
    change(model)
    assert {found.rule for found in violations(model)} == {rule, *others}


@pytest.mark.parametrize(
    ("rule", "phase", "change"),
    [("attention_unbounded", "prefill", hidden_cache), ("element_type", "decode", double_inside)],
)
def test_broken_out_of_sight(
    rule: str, phase: str, change: Break, of_phase: Callable[[str], ir.Model]
) -> None:
    model = of_phase(phase)
    change(model)
    assert {found.rule for found in violations(model)} == {rule}


def test_a_violation_is_refused_by_name(
    of_phase: Callable[[str], ir.Model], tmp_path: Path, lowered: Graphs
) -> None:
    model: Any = of_phase("decode")
    for value in model.graph.initializers.values():
        if value.const_value is None:
            place: Any = ("w.bin", 0, 0, value.dtype)
            value.const_value = ir.ExternalTensor(*place, shape=value.shape, name=value.name)
    ir.save(model, tmp_path / "decode.onnx")
    check_graph(tmp_path / "decode.onnx")
    set_float("Attention", "softcap", 5.0)(model)
    ir.save(model, tmp_path / "decode.onnx")
    with pytest.raises(UnsupportedError, match=r"decode.onnx, attention_softcap: attention.0"):
        check_graph(tmp_path / "decode.onnx")
