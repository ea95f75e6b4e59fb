"""Lengths and positions of the `cuda` target: the same numbers, with nothing read on the host."""

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort

from trtllm_lite.exporter.passes import count_on_device, take_longest

POSITIONS = """<ir_version: 10, opset_import: ["" : 23]>
g (int64[batch, seq] input_ids, int64[batch, 1] past) => (int64[batch, seq] positions)
<int64 zero = {0}, int64 one = {1}, int64[1] axis = {%d}> {
    length = Shape <start = %d, end = %d> (input_ids)
    end = Squeeze (length)
    steps = Range (zero, end, one)
    row = Unsqueeze (steps, axis)
    positions = Add (past, row)
}"""

ATTENTION = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
g (float[batch, seq, 16] q, float[batch, seq, 16] k, float[batch, seq, 16] v,
   int32[batch] past_lens, int32[batch] query_lens,
   float[batch, 1, capacity, 16] past_key_0, float[batch, 1, capacity, 16] past_value_0)
   => (float[batch, seq, 16] out, float[batch, 1, capacity, 16] present_key_0,
       float[batch, 1, capacity, 16] present_value_0)
<int32 one = {1}, float[1] sink = {0.5}> {
    total = Add (past_lens, query_lens)
    longest = ReduceMax <keepdims = 0> (total)
    last = Sub (total, one)
    out, present_key_0, present_value_0 = com.microsoft.GroupQueryAttention
        <num_heads = 1, kv_num_heads = 1>
        (q, k, v, past_key_0, past_value_0, last, longest, , , , , %s, , , , , query_lens)
}"""


def read(text: str) -> ir.Model:
    model: ir.Model = ir.from_proto(onnx.parser.parse_model(text))
    return model


def computed(model: ir.Model, feeds: dict[str, Any]) -> list[Any]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def test_positions_are_counted_by_a_running_sum() -> None:
    model = read(POSITIONS % (0, 1, 2))
    assert count_on_device(model) == 1
    assert {n.op_type for n in model.graph} == {"Mul", "Add", "CumSum", "Sub"}
    feeds = {"input_ids": np.array([[7, -3, 2], [0, 0, 1]]), "past": np.array([[4], [0]])}
    (positions,) = computed(model, feeds)
    assert positions.tolist() == [[4, 5, 6], [0, 1, 2]]
    assert count_on_device(model) == 0


def test_other_ranges_stay() -> None:
    """Of another axis than the tokens, or along another one."""
    for axis, start in ((0, 0), (1, 1)):
        assert count_on_device(read(POSITIONS % (axis, start, start + 1))) == 0


def test_the_longest_length_becomes_an_input() -> None:
    for sink, last in (("", 7), ("sink", 12)):
        before, model = read(ATTENTION % sink), read(ATTENTION % sink)
        assert take_longest(model) == 1
        (node,) = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
        assert len(node.inputs) == last
        assert [v.name for v in model.graph.inputs][5:7] == ["max_total_len", "past_key_0"]
        assert "ReduceMax" not in {n.op_type for n in model.graph}
        rng = np.random.default_rng(0)
        feeds = {n: rng.standard_normal((1, 3, 16), np.float32) for n in "qkv"}
        lengths = {"past_lens": [4], "query_lens": [3]}
        feeds |= {n: np.array(v, np.int32) for n, v in lengths.items()}
        cache = rng.standard_normal((2, 1, 1, 9, 16), np.float32)
        feeds |= {"past_key_0": cache[0], "past_value_0": cache[1]}
        given = {**feeds, "max_total_len": np.array([7], np.int32)}
        for got, want in zip(computed(model, given), computed(before, feeds), strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_graph_without_attention_is_left_alone() -> None:
    assert take_longest(read(POSITIONS % (0, 1, 2))) == 0
