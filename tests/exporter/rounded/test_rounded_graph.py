"""Graphs in half precision computed in float32: exactly, or with every value rounded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from trtllm_lite.exporter.replay import greedy, prefill
from trtllm_lite.exporter.rounded.graph import in_float32
from trtllm_lite.exporter.rounded.rotary import unfold_rotary
from trtllm_lite.runtime.backends import open_for_proof
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.bundle import Bundle, open_bundle

Array = npt.NDArray[Any]
TYPES: dict[ir.DataType, Any] = {
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
}
kinds = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name.lower())


def value(name: str, kind: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))


def weight(name: str, numbers: Array, kind: ir.DataType) -> ir.Value:
    made = value(name, kind, *numbers.shape)
    made.const_value = ir.tensor(numbers.astype(TYPES[kind]), dtype=kind, name=name)
    return made


def chain(kind: ir.DataType, w: Array, b: Array) -> ir.Model:
    """float32 x -> narrow x, sigmoid(x w + b) moved about, and that in float32 again."""
    x, weights, bias = (
        value("x", ir.DataType.FLOAT, 3, 8),
        weight("w", w, kind),
        weight("b", b, kind),
    )
    steps = [ir.node("Cast", [x], {"to": kind})]
    for operator, more, attributes in (
        ("MatMul", [weights], {}),
        ("Add", [bias], {}),
        ("Sigmoid", [], {}),
        ("Transpose", [], {"perm": [1, 0]}),
    ):
        steps.append(ir.node(operator, [steps[-1].outputs[0], *more], attributes))
    for node, name, shape in zip(steps, "ndsgt", [(3, 8), *[(3, 5)] * 3, (5, 3)], strict=True):
        node.outputs[0].name = name
        node.outputs[0].shape, node.outputs[0].type = ir.Shape(shape), ir.TensorType(kind)
    steps.append(ir.node("Cast", [steps[-1].outputs[0]], {"to": ir.DataType.FLOAT}))
    y = steps[-1].outputs[0]
    y.name, y.shape, y.type = "y", ir.Shape((5, 3)), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [x], [y], nodes=steps, initializers=[weights, bias], opset_imports={"": 23}, name="chain"
    )
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, x: Array) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, options, ["CPUExecutionProvider"])
    found: Array = session.run(["y"], {"x": x})[0]
    return found


@kinds
def test_each_value_is_rounded_once(kind: ir.DataType) -> None:
    narrow, rng = TYPES[kind], np.random.default_rng(0)

    def rounded(numbers: Array) -> Array:
        result: Array = numbers.astype(narrow).astype(np.float32)
        return result

    x, w, b = (rng.normal(size=s).astype(np.float32) for s in ((3, 8), (8, 5), (5,)))
    model = chain(kind, w, b)
    total = rounded(rounded(rounded(x) @ rounded(w)) + rounded(b))
    expected = rounded(1 / (1 + np.exp(-total))).T
    np.testing.assert_array_equal(run(in_float32(model, kind, rounded=True), x), expected)
    plain = run(in_float32(model, kind), x)
    exact = (1 / (1 + np.exp(-(x @ rounded(w) + rounded(b))))).T
    np.testing.assert_allclose(plain, exact, rtol=1e-5)
    assert np.abs(plain - expected).max() > 1e-5


@kinds
def test_what_goes_beyond_the_range_is_infinite(kind: ir.DataType) -> None:
    """After the product, before what brings it back."""
    w = np.full((8, 5), 200.0, np.float32)
    x = np.full((3, 8), 200.0, np.float32)
    model = chain(kind, w, np.full(5, -320_000.0 if kind == ir.DataType.BFLOAT16 else -60_000.0))
    found = run(in_float32(model, kind, rounded=True), x)
    assert np.all(found == (1.0 if kind == ir.DataType.FLOAT16 else 0.5))


@kinds
def test_values_keep_their_names_and_weights_their_bytes(kind: ir.DataType) -> None:
    model = chain(kind, np.ones((8, 5), np.float32), np.ones(5, np.float32))
    for rounded in (False, True):
        made = in_float32(model, kind, rounded=rounded)
        names = {v.name for node in made.graph for v in node.outputs}
        assert {"n", "d", "s", "g", "t", "y"} <= names
        assert {v.dtype for v in made.graph.initializers.values()} == {kind}
        casts = sum(node.op_type == "Cast" for node in made.graph)
        # x, y and two weights; with two around each value that is no move of another.
        assert casts == (4 + 2 * 4 if rounded else 4)
    assert {v.dtype for node in model.graph for v in node.outputs} == {kind, ir.DataType.FLOAT}


def test_rotation_as_a_node_is_that_of_the_attention(
    tiny_bundle: Path, as_cuda: Callable[[Bundle, Path], Bundle], tmp_path: Path
) -> None:
    """Ragged prompts, chunks that continue from the cache, and decode, in float32."""
    bundle = as_cuda(open_bundle(tiny_bundle), tmp_path)
    prompts = [np.random.default_rng(n).integers(0, 320, n).tolist() for n in (9, 1, 17)]

    def seen() -> tuple[list[list[int]], Array, Array]:
        session = open_for_proof(bundle, SessionOptions(num_slots=3, capacity=64))
        tokens, logits = greedy(session, prompts, 6)
        chunked = prefill(session, prompts, 4)
        session.close()
        return tokens, logits, chunked

    tokens, logits, chunked = seen()
    for spec in bundle.manifest.graphs:
        model = ir.load(tmp_path / spec.file)
        attentions = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
        assert all(n.attributes.get_int("do_rotary") == 1 for n in attentions)
        assert unfold_rotary(model) == len(attentions) == bundle.manifest.model.num_layers
        assert all(n.attributes.get_int("do_rotary") == 0 for n in attentions)
        assert unfold_rotary(model) == 0
        ir.save(model, tmp_path / spec.file)
    apart = seen()
    assert apart[0] == tokens
    np.testing.assert_allclose(apart[1], logits, atol=1e-5)
    np.testing.assert_allclose(apart[2], chunked, atol=1e-5)
