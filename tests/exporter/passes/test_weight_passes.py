"""Weights without data: folded around, packed, stored in another type, listed."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from trtllm_lite.exporter.passes import (
    add_storage_casts,
    drop_trace_notes,
    drop_unused_weights,
    external_weights,
    fold_constants,
    fuse_linear,
    pack_weights,
    scopes,
    take_tables,
    weight_parts,
)
from trtllm_lite.exporter.passes.weights import add_table

Make = Callable[..., ir.Model]
Run = Callable[..., list[Any]]
Ops = Callable[[ir.Model], list[str]]
Array = Callable[..., Any]

LINEAR = """agraph (float[2,3] xWEIGHTS) => (float[2,5] y) {
    t = Transpose<perm = [1, 0]>(w)
    y = MatMul(x, t)
}"""


# fold_constants


def test_fold_constants_keeps_weights_and_numbers(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array
) -> None:
    made = make_graph(
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
    (got,) = run_graph(made, {"x": x}, {"w": w, "unread": w})
    np.testing.assert_allclose(got, 6 * x + w, rtol=1e-6)


def test_fold_constants_gives_weights_back_after_an_error(
    make_graph: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("broken")

    made = make_graph(LINEAR, {"w": (5, 3)})
    module = "trtllm_lite.exporter.passes.constants"
    monkeypatch.setattr(f"{module}.optimizer.fold_constants_ir", broken)
    with pytest.raises(RuntimeError):
        fold_constants(made)
    assert list(external_weights([made])) == ["w"]
    assert [v.name for v in made.graph.inputs] == ["x"]


# Packed weights, tables


def test_packed_weights_know_their_parts(make_graph: Make) -> None:
    made = make_graph(LINEAR, {"w": (5, 3), "u": (2, 3), "v": (4, 3)})
    weights = dict(made.graph.initializers)
    assert weight_parts(weights["u"]) == ("u",)
    once = pack_weights(made.graph, [weights["u"], weights["v"]])
    assert (once.name, once.shape) == ("u+v", ir.Shape([6, 3]))
    twice = pack_weights(made.graph, [weights["w"], once])
    assert (twice.name, twice.shape) == ("w+u+v", ir.Shape([11, 3]))
    assert weight_parts(twice) == ("w", "u", "v")
    assert list(external_weights([made])) == ["w+u+v"]


def test_tables_keep_their_numbers_until_they_are_taken(make_graph: Make, array: Array) -> None:
    made, numbers = make_graph(LINEAR, {"w": (5, 3)}), array(4, 2)
    add_table(made.graph, "t", numbers)
    assert list(external_weights([made])) == ["w"]
    assert np.array_equal(take_tables(made)["t"], numbers)
    assert set(external_weights([made])) == {"w", "t"}
    # A table stays float32 whatever the weights are stored in.
    assert add_storage_casts(made, ir.DataType.BFLOAT16) == 1
    kinds = {n: v.dtype for n, v in external_weights([made]).items()}
    assert kinds == {"w": ir.DataType.BFLOAT16, "t": ir.DataType.FLOAT}


# Storage, unused weights, notes


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(ir.DataType.FLOAT16, np.float16), (ir.DataType.BFLOAT16, ml_dtypes.bfloat16)],
    ids=["float16", "bfloat16"],
)
def test_add_storage_casts(
    make_graph: Make, run_graph: Run, ops: Ops, array: Array, kind: ir.DataType, dtype: Any
) -> None:
    made = make_graph(
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
    got = run_graph(made, {"x": x}, {"w": w.astype(dtype), "b": b.astype(dtype)})[0]
    want = x @ w.astype(dtype).astype(np.float32).T + b.astype(dtype).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_packed_weight_stays_packed_in_another_type(make_graph: Make) -> None:
    made = make_graph(LINEAR, {"w": (5, 3), "u": (2, 3)})
    weights = dict(made.graph.initializers)
    pack_weights(made.graph, [weights["w"], weights["u"]])
    add_storage_casts(made, ir.DataType.FLOAT16)
    (stored,) = external_weights([made]).values()
    assert weight_parts(stored) == ("w", "u")


def test_drop_unused_weights(make_graph: Make) -> None:
    made = make_graph(LINEAR, {"w": (5, 3), "of_the_other_phase": (2,)})
    assert drop_unused_weights(made) == 1
    assert list(external_weights([made])) == ["w"]
    assert drop_unused_weights(made) == 0


def test_external_weights_are_each_listed_once(make_graph: Make) -> None:
    first = make_graph(LINEAR, {"w": (5, 3)})
    second = make_graph(LINEAR, {"w": (5, 3), "u": (1,)})
    assert list(external_weights([first, second])) == ["w", "u"]


def test_drop_trace_notes_keeps_the_module_names(make_graph: Make) -> None:
    made = make_graph(LINEAR, {"w": (5, 3)})
    for node in made.graph:
        node.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'model', 'model.layers.3', 'x']"
        node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/me/model.py"'
        node.metadata_props["namespace"] = ": a/b"
    assert drop_trace_notes(made) == 2
    for node in made.graph:
        assert scopes(node) == ["", "model", "model.layers.3", "x"]
        assert set(node.metadata_props) == {"pkg.torch.onnx.name_scopes", "namespace"}
