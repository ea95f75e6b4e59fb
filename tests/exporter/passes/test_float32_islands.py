"""Values that stay float32 in a float16 graph: what is computed, and what is left alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from trtllm_lite.exporter.passes.islands import keep_float32
from trtllm_lite.exporter.rounded.graph import FLOAT, HALF, in_float32
from trtllm_lite.runtime.errors import UnsupportedError

Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 8)).astype(np.float16)
WEIGHT = (RNG.uniform(-1, 1, size=(8, 8)) * 60_000).astype(np.float16)
TINY = np.array(2.0**-14, np.float16)


def value(name: str, shape: Sequence[int] = (2, 8), kind: ir.DataType = HALF) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))


def number(array: Array, name: str) -> ir.Value:
    return ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        const_value=ir.tensor(array, name=name),
    )


def make(op: str, inputs: Sequence[ir.Value], name: str, **attributes: Any) -> ir.Node:
    return ir.node(op, inputs, attributes, outputs=[value(name)])


def residual() -> ir.Model:
    """big = x @ weight, beyond float16; total = x + big; out = total / 2^14, within it."""
    x, weight, tiny = value("x"), number(WEIGHT, "weight"), number(TINY, "tiny")
    product = make("MatMul", [x, weight], "big")
    total = make("Add", [x, product.outputs[0]], "total")
    out = make("Mul", [total.outputs[0], tiny], "out")
    graph = ir.Graph(
        [x],
        out.outputs,
        nodes=[product, total, out],
        initializers=[weight, tiny],
        opset_imports={"": 24},
    )
    return ir.Model(graph, ir_version=11)


def run(model: ir.Model, *, rounded: bool) -> Array:
    """Its output, in float32, rounded to float16 where the graph is float16 or not at all."""
    work = in_float32(model, rounded=rounded)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = ir.to_proto(work).SerializeToString()
    session = ort.InferenceSession(data, options, ["CPUExecutionProvider"])
    found: Array = session.run(None, {"x": X.astype(np.float32)})[0]
    return found


EXPECTED = (X.astype(float) + X.astype(float) @ WEIGHT.astype(float)) * 2.0**-14


def test_what_float16_makes_infinite_is_finite() -> None:
    model = residual()
    assert np.isinf(run(model, rounded=True)).any()
    assert np.allclose(run(model, rounded=False), EXPECTED, rtol=1e-4)
    assert keep_float32(model, {"big", "total"}) == 3
    assert np.allclose(run(model, rounded=True), EXPECTED, rtol=3e-3, atol=3e-3)
    values = {v.name: v for node in model.graph for v in node.outputs}
    assert [values[name].dtype for name in ("big", "total", "out")] == [FLOAT, FLOAT, HALF]
    assert [v.name for v in model.graph.outputs] == ["out"]


def test_a_weight_is_not_widened() -> None:
    model = residual()
    keep_float32(model, {"big", "total"})
    weight = model.graph.initializers["weight"]
    assert weight.dtype == HALF
    assert [use.node.op_type for use in weight.uses()] == ["MatMul"]


def test_a_product_of_a_wide_value_is_computed_in_float16() -> None:
    """wide = x * 20000 * 20000, out = (wide @ weight) / 2^14 / 2^14."""
    x, factor = value("x"), number(np.array(20_000, np.float16), "factor")
    weight = number(RNG.normal(size=(8, 8)).astype(np.float16), "small")
    once = make("Mul", [x, factor], "once")
    wide = make("Mul", [once.outputs[0], number(np.array(64, np.float16), "more")], "wide")
    product = make("MatMul", [wide.outputs[0], weight], "product")
    tiny = number(TINY, "tiny")
    out = make("Mul", [product.outputs[0], tiny], "out")
    initializers = [factor, weight, tiny, wide.inputs[1]]
    graph = ir.Graph(
        [x],
        out.outputs,
        nodes=[once, wide, product, out],
        initializers=[v for v in initializers if v is not None],
        opset_imports={"": 24},
    )
    model = ir.Model(graph, ir_version=11)
    exact = run(model, rounded=False)
    assert not np.isfinite(run(model, rounded=True)).all()
    assert keep_float32(model, {"once", "wide", "product"}) == 4
    assert np.allclose(run(model, rounded=True), exact, rtol=3e-3, atol=0.5)
    assert product.inputs[0] is not None
    assert product.inputs[0].dtype == HALF
    assert weight.dtype == HALF


def test_other_names_change_nothing() -> None:
    model = residual()
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert keep_float32(model, {"x", "weight", "elsewhere"}) == 0
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_table_is_looked_up_as_it_is() -> None:
    ids = value("ids", (2,), ir.DataType.INT64)
    table = number(WEIGHT, "table")
    rows = make("Gather", [table, ids], "rows")
    out = make("Mul", [rows.outputs[0], number(TINY, "tiny")], "out")
    constants = [table, out.inputs[1]]
    graph = ir.Graph(
        [ids],
        out.outputs,
        nodes=[rows, out],
        initializers=[v for v in constants if v is not None],
        opset_imports={"": 24},
    )
    model = ir.Model(graph, ir_version=11)
    assert keep_float32(model, {"rows"}) == 2
    assert [use.node.op_type for use in table.uses()] == ["Gather"]
    wide = {v.name: v for node in model.graph for v in node.outputs}["rows"]
    producer = wide.producer()
    assert producer is not None
    assert (wide.dtype, producer.op_type) == (FLOAT, "Cast")


def test_a_value_is_cast_once_for_all_its_readers() -> None:
    x = value("x")
    wide = [make("Mul", [x, x], f"wide{i}") for i in range(3)]
    outs = [make("Sqrt", [node.outputs[0]], f"out{i}") for i, node in enumerate(wide)]
    graph = ir.Graph(
        [x], [o.outputs[0] for o in outs], nodes=[*wide, *outs], opset_imports={"": 24}
    )
    model = ir.Model(graph, ir_version=11)
    assert keep_float32(model, {"wide0", "wide1", "wide2"}) == 6
    assert [use.node.op_type for use in x.uses()] == ["Cast"]


def test_a_cast_casts_to_what_is_wanted() -> None:
    x = value("x", kind=FLOAT)
    cast = make("Cast", [x], "half", to=HALF)
    out = make("Mul", [cast.outputs[0], number(TINY, "tiny")], "out")
    constant = out.inputs[1]
    assert constant is not None
    nodes, kinds = [cast, out], {"": 24}
    graph = ir.Graph([x], out.outputs, nodes=nodes, initializers=[constant], opset_imports=kinds)
    assert keep_float32(ir.Model(graph, ir_version=11), {"half"}) == 2
    assert cast.attributes.get_int("to") == FLOAT
    assert cast.outputs[0].dtype == FLOAT


@pytest.mark.parametrize("op", ["Attention", "GroupQueryAttention", "TensorScatter"])
def test_attention_is_float16(op: str) -> None:
    x = value("x")
    wide = make("Mul", [x, x], "wide")
    node = make(op, [wide.outputs[0], x, x], "out")
    graph = ir.Graph([x], node.outputs, nodes=[wide, node], opset_imports={"": 24})
    with pytest.raises(UnsupportedError, match="--dtype bfloat16"):
        keep_float32(ir.Model(graph, ir_version=11), {"wide"})
