"""A float32 graph becomes one in half precision, and what cannot is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.passes import compute_in
from trtllm_lite.runtime.errors import UnsupportedError

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
GRAPH = """agraph (int64[batch,seq] input_ids, float[batch,2,cap,4] past_key_0 WEIGHTS)
    => (float[batch,seq,6] logits, float[batch,2,cap,4] present_key_0) {
    number = Cast<to = 1>(input_ids)
    three = Constant<value = int64[1] {-1}>()
    column = Unsqueeze(number, three)
    factor = Constant<value = float {FACTOR}>()
    scaled = Mul(column, factor)
    logits = MatMul(scaled, weight)
    present_key_0 = Identity(past_key_0)
}"""


def graph(make_graph: Make, factor: str = "0.1") -> ir.Model:
    made: ir.Model = make_graph(GRAPH.replace("FACTOR", factor), {"weight": (1, 6)})
    return made


def test_all_floats_are_of_the_type_but_the_logits(make_graph: Make) -> None:
    made = graph(make_graph)
    assert compute_in(made, "float16") == 8
    values = [*made.graph.inputs, *made.graph.initializers.values()]
    values += [v for node in made.graph for v in node.outputs]
    assert [v.name for v in values if v.dtype == FLOAT] == ["logits"]
    assert made.graph.initializers["weight"].dtype == HALF
    (cast,) = [n for n in made.graph if n.outputs[0].name == "number"]
    assert cast.attributes.get_int("to") == HALF


def test_its_numbers_are_of_the_type(make_graph: Make, run_graph: Run) -> None:
    """ONNX Runtime may keep float32 between two nodes on a CPU; constants are rounded in any
    case."""
    made = graph(make_graph)
    compute_in(made, "float16")
    weight = np.linspace(0.5, 2.0, 6, dtype=np.float16)[None]
    ids, past = np.array([[3, 70]]), np.ones((1, 2, 5, 4), np.float16)
    logits, present = run_graph(made, {"input_ids": ids, "past_key_0": past}, {"weight": weight})
    assert (logits.dtype, present.dtype) == (np.float32, np.float16)
    exact = ids[..., None] * float(np.float16(0.1)) @ weight.astype(float)
    np.testing.assert_allclose(logits, exact, rtol=1e-3)
    assert np.abs(logits / (ids[..., None] * 0.1 @ weight.astype(float)) - 1).max() > 1e-4


@pytest.mark.parametrize(("dtype", "fits"), [("float16", False), ("bfloat16", True)])
def test_a_constant_has_to_fit(dtype: str, fits: bool, make_graph: Make) -> None:
    made = graph(make_graph, "1e6")
    if fits:
        compute_in(made, dtype)
    else:
        with pytest.raises(UnsupportedError, match="a constant beyond the range of float16"):
            compute_in(made, dtype)


def test_angles_are_no_half_precision(make_graph: Make) -> None:
    made = graph(make_graph)
    (mul,) = [n for n in made.graph if n.op_type == "Mul"]
    made.graph.insert_before(mul, ir.node("Cos", [mul.inputs[0]]))
    with pytest.raises(UnsupportedError, match="angles are computed in the graph, in float16"):
        compute_in(made, "float16")
