"""Edits and reads of ONNX bytes against the onnx package."""

from collections.abc import Callable

import onnx
import pytest
from onnx import TensorProto, helper

from trtllm_lite.runtime.engines.onnx_edit import AttentionNode, attention_nodes, with_fixed_dim
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.protobuf import WireError


def fixed_by_onnx(model: onnx.ModelProto, name: str, size: int) -> bytes:
    """What `with_fixed_dim` has to give, by the onnx package."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == name:
                dim.dim_value = size
    data: bytes = copy.SerializeToString()
    return data


@pytest.mark.parametrize("size", [1, 127, 128, 20480, 2**31 - 1])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_dimension_is_fixed_everywhere(
    engine_graph: Callable[[Phase], onnx.ModelProto], phase: Phase, size: int
) -> None:
    model = engine_graph(phase)
    made = with_fixed_dim(model.SerializeToString(), "capacity", size)
    assert made == fixed_by_onnx(model, "capacity", size)


def test_shapes_inside_the_graph_are_fixed_too(
    engine_graph: Callable[[Phase], onnx.ModelProto],
) -> None:
    model = engine_graph("decode")
    inside = helper.make_tensor_value_info("inside", TensorProto.BOOL, ["batch", 1, "capacity"])
    model.graph.value_info.append(inside)
    made = with_fixed_dim(model.SerializeToString(), "capacity", 96)
    assert made == fixed_by_onnx(model, "capacity", 96)
    assert b"capacity" not in made


def test_a_dimension_that_is_not_there_is_an_error(
    engine_graph: Callable[[Phase], onnx.ModelProto],
) -> None:
    with pytest.raises(WireError, match="no value of the graph has a dimension 'length'"):
        with_fixed_dim(engine_graph("decode").SerializeToString(), "length", 96)


def test_lengths_in_a_long_form_are_refused() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["capacity"])
    model = helper.make_model(helper.make_graph([], "g", [value], []))
    data, body = model.SerializeToString(), value.SerializeToString()
    at = data.index(body) - 1
    graph = data[data.index(b"\x3a") + 2 : at] + bytes([len(body) | 0x80, 0]) + body
    with pytest.raises(WireError, match="not in its shortest form"):
        with_fixed_dim(b"\x3a" + bytes([len(graph)]) + graph, "capacity", 5)


def test_attentions_are_read(engine_graph: Callable[[Phase], onnx.ModelProto]) -> None:
    def expected(phase: Phase) -> list[AttentionNode]:
        names = [n.output[0] for n in engine_graph(phase).graph.node if n.op_type == "Attention"]
        lengths = None if phase == "prefill" else "visible_lens"
        return [AttentionNode(name, lengths, phase != "decode") for name in names]

    for phase in ("prefill", "decode", "extend"):
        found = attention_nodes(engine_graph(phase).SerializeToString())
        assert list(found) == expected(phase)
        assert len(found) == 2


def test_an_attention_without_attributes_is_not_causal() -> None:
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["out"])
    other = helper.make_node("MatMul", ["a", "b"], ["c"])
    model = helper.make_model(helper.make_graph([other, node], "g", [], []))
    assert attention_nodes(model.SerializeToString()) == (AttentionNode("out", None, False),)
