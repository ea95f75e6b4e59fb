"""Each pass on the smallest graph that shows it: what it counts, and that numbers stay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from trtllm_lite.exporter import graphs
from trtllm_lite.exporter.graphs import Graphs
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.passes import (
    add_storage_casts,
    drop_trace_notes,
    drop_unused_weights,
    external_weights,
    fold_constants,
    fuse_linear,
    fuse_rms_norm,
    scopes,
)
from trtllm_lite.runtime.manifest import Phase

Arrays = dict[str, Any]
HEAD = '<ir_version: 10, opset_import: ["" : 23]>\n'
RNG = np.random.default_rng(0)


def model(text: str, weights: dict[str, tuple[int, ...]]) -> ir.Model:
    """A graph whose weights have no data, as the tracer leaves it."""
    inputs = "".join(f", float[{','.join(map(str, s))}] {n}" for n, s in weights.items())
    made = ir.from_onnx_text(HEAD + text.replace("WEIGHTS", inputs))
    for value in [v for v in made.graph.inputs if v.name in weights]:
        made.graph.inputs.remove(value)
        made.graph.initializers[str(value.name)] = value
    return made


def run(made: ir.Model, feeds: Arrays, weights: Arrays) -> list[Any]:
    """Run a copy of the graph with data in its weights."""
    copy = made.clone()
    for name, array in weights.items():
        if name in copy.graph.initializers:
            copy.graph.initializers[name].const_value = ir.tensor(array, name=name)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        ir.to_proto(copy).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def ops(made: ir.Model) -> list[str]:
    return [node.op_type for node in made.graph]


def array(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


# fuse_linear

LINEAR = """agraph (float[2,3] xWEIGHTS) => (float[2,5] y) {
    t = Transpose<perm = [1, 0]>(w)
    y = MatMul(x, t)
}"""


def test_fuse_linear() -> None:
    made, x, w = model(LINEAR, {"w": (5, 3)}), array(2, 3), array(5, 3)
    before = run(made, {"x": x}, {"w": w})
    assert fuse_linear(made) == 1
    assert ops(made) == ["FusedMatMul"]
    (node,) = made.graph
    assert node.domain == "com.microsoft"
    assert [v.name for v in node.inputs if v is not None] == ["x", "w"]
    np.testing.assert_allclose(run(made, {"x": x}, {"w": w})[0], before[0], rtol=1e-6)
    np.testing.assert_allclose(before[0], x @ w.T, rtol=1e-5)
    assert fuse_linear(made) == 0


def test_fuse_linear_of_a_weight_that_is_read_twice() -> None:
    """A tied embedding: gathered from, and transposed for the output layer."""
    made = model(
        """agraph (float[2,3] x, int64[2] iWEIGHTS) => (float[2,5] y, float[2,3] e) {
            e = Gather(w, i)
            t = Transpose<perm = [1, 0]>(w)
            y = MatMul(x, t)
        }""",
        {"w": (5, 3)},
    )
    feeds, weights = {"x": array(2, 3), "i": np.array([4, 0])}, {"w": array(5, 3)}
    before = run(made, feeds, weights)
    assert fuse_linear(made) == 1
    for got, want in zip(run(made, feeds, weights), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert list(external_weights([made])) == ["w"]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        (
            "agraph (float[2,3] x, float[5,3] wWEIGHTS) => (float[2,5] y) "
            "{ t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) }",
            {},
        ),
        ("agraph (float[2,3] xWEIGHTS) => (float[2,5] y) { y = MatMul(x, w) }", {"w": (3, 5)}),
        (
            "agraph (float[2,3] xWEIGHTS) => (float[5,2] y) "
            "{ t = Transpose<perm = [1, 0]>(x) y = MatMul(w, t) }",
            {"w": (5, 3)},
        ),
        (
            "agraph (float[4,2,3] xWEIGHTS) => (float[4,2,5] y) "
            "{ t = Transpose<perm = [0, 2, 1]>(w) y = MatMul(x, t) }",
            {"w": (4, 5, 3)},
        ),
        (
            "agraph (float[3,3] xWEIGHTS) => (float[3,3] y) "
            "{ t = Transpose<perm = [0, 1]>(w) y = MatMul(x, t) }",
            {"w": (3, 3)},
        ),
    ],
    ids=["activation", "untransposed", "left side", "three dimensions", "not swapped"],
)
def test_fuse_linear_leaves_others_alone(text: str, weights: dict[str, tuple[int, ...]]) -> None:
    made = model(text, weights)
    before = ops(made)
    assert fuse_linear(made) == 0
    assert ops(made) == before


# fuse_rms_norm

RMS = """agraph (float[2,3,8] xWEIGHTS) => (float[2,3,8] y) {
    two = Constant<value = float {2.0}>()
    eps = Constant<value = float {0.00001}>()
    axes = Constant<value = int64[1] {-1}>()
    p = Pow(x, two)
    m = ReduceMean<keepdims = 1, noop_with_empty_axes = 0>(p, axes)
    s = Add(m, eps)
    q = Sqrt(s)
    r = Reciprocal(q)
    n = Mul(x, r)
    y = Mul(w, n)
}"""


def test_fuse_rms_norm() -> None:
    made, x, w = model(RMS, {"w": (8,)}), array(2, 3, 8), array(8)
    fold_constants(made)
    before = run(made, {"x": x}, {"w": w})
    want = w * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(before[0], want, rtol=1e-5)
    assert fuse_rms_norm(made) == 1
    assert "RMSNormalization" in ops(made)
    assert not {"Pow", "ReduceMean", "Sqrt", "Reciprocal"} & set(ops(made))
    np.testing.assert_allclose(run(made, {"x": x}, {"w": w})[0], want, rtol=1e-5)


def test_a_mean_over_another_axis_is_no_rms_norm() -> None:
    made = model(RMS.replace("int64[1] {-1}", "int64[1] {1}"), {"w": (8,)})
    fold_constants(made)
    assert fuse_rms_norm(made) == 0


# fold_constants


def test_fold_constants_keeps_weights_and_numbers() -> None:
    made = model(
        """agraph (float[2,3] xWEIGHTS) => (float[2,3] y) {
            a = Constant<value = float {2.0}>()
            b = Constant<value = float {3.0}>()
            c = Mul(a, b)
            d = Mul(x, c)
            same = Identity(d)
            unused = Add(x, x)
            y = Add(same, w)
        }""",
        {"w": (2, 3), "unread": (4,)},
    )
    x, w = array(2, 3), array(2, 3)
    before = len(made.graph)
    assert fold_constants(made) == before - len(made.graph)
    assert ops(made) == ["Mul", "Add"]
    assert [v.name for v in made.graph.inputs] == ["x"]
    assert list(external_weights([made])) == ["w", "unread"]
    assert all(v.const_value is None for v in external_weights([made]).values())
    np.testing.assert_allclose(run(made, {"x": x}, {"w": w, "unread": w})[0], 6 * x + w, rtol=1e-6)


def test_fold_constants_gives_weights_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("broken")

    made = model(LINEAR, {"w": (5, 3)})
    monkeypatch.setattr("trtllm_lite.exporter.passes.optimizer.fold_constants_ir", broken)
    with pytest.raises(RuntimeError):
        fold_constants(made)
    assert list(external_weights([made])) == ["w"]
    assert [v.name for v in made.graph.inputs] == ["x"]


# Storage, unused weights, notes


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(ir.DataType.FLOAT16, np.float16), (ir.DataType.BFLOAT16, ml_dtypes.bfloat16)],
    ids=["float16", "bfloat16"],
)
def test_add_storage_casts(kind: ir.DataType, dtype: Any) -> None:
    made = model(
        """agraph (float[2,3] xWEIGHTS) => (float[2,5] z) {
            t = Transpose<perm = [1, 0]>(w)
            y = MatMul(x, t)
            z = Add(y, b)
        }""",
        {"w": (5, 3), "b": (5,)},
    )
    fuse_linear(made)
    made.graph.initializers["k"] = ir.Value(name="k", const_value=ir.tensor([1.0], name="k"))
    x, w, b = array(2, 3), array(5, 3), array(5)
    assert add_storage_casts(made, kind) == 2
    stored = external_weights([made])
    assert set(stored) == {"w", "b"}
    assert {value.dtype for value in stored.values()} == {kind}
    assert ops(made).count("Cast") == 2
    got = run(made, {"x": x}, {"w": w.astype(dtype), "b": b.astype(dtype)})[0]
    want = x @ w.astype(dtype).astype(np.float32).T + b.astype(dtype).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_drop_unused_weights() -> None:
    made = model(LINEAR, {"w": (5, 3), "of_the_other_phase": (2,)})
    assert drop_unused_weights(made) == 1
    assert list(external_weights([made])) == ["w"]
    assert drop_unused_weights(made) == 0


def test_external_weights_are_each_listed_once() -> None:
    first, second = model(LINEAR, {"w": (5, 3)}), model(LINEAR, {"w": (5, 3), "u": (1,)})
    assert list(external_weights([first, second])) == ["w", "u"]


def test_drop_trace_notes_keeps_the_module_names() -> None:
    made = model(LINEAR, {"w": (5, 3)})
    for node in made.graph:
        node.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'model', 'model.layers.3', 'x']"
        node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/me/model.py"'
        node.metadata_props["namespace"] = ": a/b"
    assert drop_trace_notes(made) == 2
    for node in made.graph:
        assert scopes(node) == ["", "model", "model.layers.3", "x"]
        assert set(node.metadata_props) == {"pkg.torch.onnx.name_scopes", "namespace"}


def test_scopes_survive_fusion() -> None:
    made = model(LINEAR, {"w": (5, 3)})
    for node in made.graph:
        node.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'model.layers.3']"
    fuse_linear(made)
    assert [scopes(node) for node in made.graph] == [["", "model.layers.3"]]


# On graphs that were traced


def test_every_linear_and_norm_of_a_traced_graph_is_fused(
    fresh_graphs: Callable[[], Graphs],
) -> None:
    made = fresh_graphs()
    # Seven projections in each of two layers and the output layer; two norms a layer and the last.
    for phase, lowered in zip(("prefill", "decode"), made.models, strict=True):
        assert made.counts[f"{phase}.fuse_linear"] == ops(lowered).count("FusedMatMul") == 15
        assert made.counts[f"{phase}.fuse_rms_norm"] == ops(lowered).count("RMSNormalization") == 5
        assert ops(lowered).count("GroupQueryAttention") == 2
        assert "MatMul" not in [n.op_type for n in lowered.graph if "layers" in str(scopes(n))]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_required_pass_that_stops_matching_is_an_error(phase: Phase) -> None:
    target = find_target("cpu")
    assert target.required <= {name for name, _ in target.passes}
    blind = replace(target, passes=tuple((n, lambda _m: 0) for n, _ in target.passes))
    made = model(LINEAR, {"w": (5, 3)})
    with pytest.raises(AssertionError, match=f"pass fuse_linear found nothing .* in {phase}"):
        graphs._lower(made, blind, phase, {})
    optional = replace(blind, required=frozenset())
    counts: dict[str, int] = {}
    graphs._lower(made, optional, phase, counts)
    assert counts[f"{phase}.fuse_linear"] == 0
