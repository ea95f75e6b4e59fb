"""The graph for one token a row computes what the graph for several does for one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.passes import drop_unread_inputs, take_one_token

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]

GRAPH = """agraph (int64[batch,seq] input_ids, int32[batch] past_lens, int32[batch] query_lens,
    int64[batch,num_logits] logits_indices, float[batch,seq,2] hidden)
    => (float[batch,num_logits,2] logits) {
    zero = Constant<value = int64[1] {0}>()
    one = Constant<value = int64[1] {1}>()
    none = Constant<value = int64 {0}>()
    unit = Constant<value = int64 {1}>()
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
    number = Cast<to = 1>(positions)
    last = Constant<value = int64[1] {-1}>()
    column = Unsqueeze(number, last)
    sum = Add(hidden, column)
    index = Unsqueeze(logits_indices, last)
    picked = GatherND<batch_dims = 1>(sum, index)
    logits = Relu(picked)
}"""


def test_one_token(make_graph: Make, run_graph: Run) -> None:
    several: ir.Model = make_graph(GRAPH)
    (positions,) = [n.outputs[0] for n in several.graph if n.op_type == "Min"]
    positions.shape = ir.Shape(["batch", "seq"])
    one = several.clone()
    assert take_one_token(one) == 2
    assert drop_unread_inputs(one) == 3
    assert [v.name for v in one.graph.inputs] == ["past_lens", "hidden"]
    assert [list(v.shape or ()) for v in one.graph.outputs] == [["batch", 1, 2]]
    given = {
        "input_ids": np.zeros((3, 1), np.int64),
        "past_lens": np.array([0, 5, 9], np.int32),
        "query_lens": np.ones(3, np.int32),
        "logits_indices": np.zeros((3, 1), np.int64),
        "hidden": np.arange(6, dtype=np.float32).reshape(3, 1, 2),
    }
    np.testing.assert_array_equal(run_graph(one, given)[0], run_graph(several, given)[0])
    assert not {"Range", "Min", "GatherND"} & {n.op_type for n in one.graph}
