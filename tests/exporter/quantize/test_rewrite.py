"""Quantized graphs compute what slow loops over the stored integers compute."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from trtllm_lite.exporter.external_data import (
    NUMPY_DTYPES,
    bind,
    in_order,
    layout,
    plain,
    write_weights,
)
from trtllm_lite.exporter.graphs import Graphs
from trtllm_lite.exporter.passes import external_weights
from trtllm_lite.exporter.passes.weights import PARTS
from trtllm_lite.exporter.quantize import apply
from trtllm_lite.exporter.quantize.apply import Prepared, prepare
from trtllm_lite.exporter.quantize.plan import FormatPlan
from trtllm_lite.exporter.quantize.quantizer import RoundToNearest, dequantized, per_channel
from trtllm_lite.exporter.quantize.rewrite import find_linears, quantize_graph
from trtllm_lite.exporter.weights import MappedSource
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.progress import NoProgress

HIDDEN, INNER, VOCAB = 72, 40, 50
Arrays = dict[str, Any]


class Memory:
    """A WeightSource of arrays, in pieces that end inside rows."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def names(self) -> frozenset[str]:
        return frozenset(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def pieces(self, name: str) -> Iterator[Any]:
        flat = self._arrays[name].reshape(-1)
        return (flat[i : i + 101] for i in range(0, len(flat), 101))


TEXT = """
<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
g (int64[batch, seq] input_ids, float[batch, seq, 72] x) => (float[batch, seq, 50] logits,
   float[batch, seq, 40] a, float[batch, seq, 40] b, float[batch, seq, 72] looked_up) {
  looked_up = Gather (embed, input_ids)
  a = com.microsoft.FusedMatMul <transB = 1> (x, first)
  b = com.microsoft.FusedMatMul <transB = 1> (x, second)
  sum = Add (x, looked_up)
  logits = com.microsoft.FusedMatMul <transB = 1> (sum, embed)
}
"""


def weights(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (VOCAB, HIDDEN), "first": (INNER, HIDDEN), "second": (INNER, HIDDEN)}
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def small_graph(text: str = TEXT, packed: dict[str, list[str]] | None = None) -> ir.Model:
    model = ir.from_onnx_text(_declared(text))
    for name, array in weights().items():
        value = next(v for v in model.graph.inputs if v.name == name)
        model.graph.inputs.remove(value)
        value.shape = ir.Shape(array.shape)
        model.graph.initializers[name] = value
        if packed and name in packed:
            value.metadata_props[PARTS] = json.dumps(packed[name])
    return model


def _declared(text: str) -> str:
    """The weights as inputs: the text form has no initializers without data."""
    shapes = {n: list(a.shape) for n, a in weights().items()}
    extra = "".join(f", float{shape} {name}" for name, shape in shapes.items())
    return text.replace(" x) =>", f" x{extra}) =>")


def session(
    model: ir.Model, phase: Phase, plan: FormatPlan, folder: Path, arrays: Arrays | None = None
) -> tuple[ort.InferenceSession, dict[str, int], Any]:
    """The rewritten graph, its weights stored by the product's own writer."""
    counts, stored = quantize_graph(model, phase, plan, find_linears([model]))
    for name in [n for n, v in model.graph.initializers.items() if not v.uses()]:
        del model.graph.initializers[name]
    coded = {s.name for s in stored}
    left = {n: v for n, v in external_weights([model]).items() if n not in coded}
    stored = in_order([*stored, *plain(left)], list(weights()))
    arrays = arrays or weights()
    source = MappedSource(Memory(arrays), {n: n for n in arrays})
    write_weights(folder / "w.bin", stored, source, RoundToNearest(), NoProgress())
    bind(model, stored, "w.bin")
    ir.save(model, folder / "m.onnx")
    providers = ["CPUExecutionProvider"]
    made = ort.InferenceSession(folder / "m.onnx", providers=providers)
    return made, counts, [s for s in stored if s.recipe.format]


def run(made: ort.InferenceSession, x: Any, ids: Any = None) -> dict[str, Any]:
    ids = np.zeros(x.shape[:2], np.int64) if ids is None else ids
    names = [o.name for o in made.get_outputs()]
    return dict(zip(names, made.run(None, {"x": x, "input_ids": ids}), strict=True))


def activations(*shape: int) -> Any:
    return np.random.default_rng(7).standard_normal((*shape, HIDDEN)).astype(np.float32)


def by_token(x: Any, weight: Any) -> Any:
    """W8A8, one token and one output at a time."""
    q, scale = per_channel("w", weight)
    out = np.zeros((*x.shape[:-1], len(weight)), np.float32)
    for at in np.ndindex(*x.shape[:-1]):
        amax = np.abs(x[at]).max()
        if amax:
            steps = np.rint(x[at] / amax * np.float32(127)).astype(np.int32)
            out[at] = (q.astype(np.int32) @ steps) * scale * (amax / np.float32(127))
    return out


def test_per_token_products(tmp_path: Path) -> None:
    made, counts, _ = session(small_graph(), "prefill", FormatPlan(prefill="w8a8"), tmp_path)
    assert counts == {"w8a8": 2}
    x = activations(2, 3)
    got = run(made, x)
    for name, weight in (("a", "first"), ("b", "second")):
        want = by_token(x, weights()[weight])
        # The quotient is rounded at other places: now and then by one step of one activation.
        step = np.abs(x).max() / 127 * np.abs(weights()[weight]).max()
        np.testing.assert_allclose(got[name], want, atol=2 * step)
        assert np.abs(got[name] - want).mean() < 0.05 * step


def test_activations_are_rounded_once_for_all_readers(tmp_path: Path) -> None:
    model = small_graph()
    session(model, "prefill", FormatPlan(prefill="w8a8"), tmp_path)
    kinds = Counter(node.op_type for node in model.graph)
    assert kinds["QuantizeLinear"] == 1
    assert kinds["MatMulIntegerToFloat"] == 2
    assert {str(n.name) for n in model.graph if n.op_type == "MatMulIntegerToFloat"} == {
        "first",
        "second",
    }


def test_a_token_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    made, _, _ = session(small_graph(), "prefill", FormatPlan(prefill="w8a8"), tmp_path)
    x = activations(2, 4)
    x[1, 2] *= 1e4
    x[1, 3] = np.nan
    together = run(made, x)
    for at in np.ndindex(2, 4):
        if at != (1, 3):
            alone = run(made, x[at][None, None])
            for name in ("a", "b"):
                np.testing.assert_array_equal(together[name][at], alone[name][0, 0])
                assert np.isfinite(together[name][at]).all()


def test_a_token_of_zeros_gives_zeros(tmp_path: Path) -> None:
    made, _, _ = session(small_graph(), "prefill", FormatPlan(prefill="w8a8"), tmp_path)
    x = activations(1, 3)
    x[0, 1] = 0
    got = run(made, x)
    assert not got["a"][0, 1].any()
    assert np.isfinite(got["a"]).all()


@pytest.mark.parametrize(
    ("kind", "bits", "block"), [("int8_block64", 8, 64), ("int4_block32", 4, 32)]
)
def test_block_products(tmp_path: Path, kind: str, bits: int, block: int) -> None:
    made, counts, _ = session(small_graph(), "decode", FormatPlan(decode=kind), tmp_path)
    assert counts == {kind: 2}
    x = activations(2, 1)
    weight = weights()["first"]
    want = x @ dequantized(RoundToNearest().quantize("w", weight, bits, block), block).T
    # The operator rounds activations to 8 bits by the block.
    step = np.abs(x).max() / 127 * np.abs(weight).max()
    np.testing.assert_allclose(run(made, x)["a"], want, atol=3 * step)


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    plan = FormatPlan(embedding="int8_block64", lm_head="int8_block64")
    made, counts, stored = session(small_graph(), "prefill", plan, tmp_path)
    assert counts == {"int8_block64": 1, "int8_block64.embedding": 1}
    places, size = layout(stored)
    assert places["embed.q8"] == places["embed.q8_rows"]
    assert size == places["embed.q8_scale"].offset + places["embed.q8_scale"].length
    assert size < 2 * VOCAB * 2 * 64 + 4096
    table = dequantized(RoundToNearest().quantize("w", weights()["embed"], 8, 64), 64)
    ids = np.array([[3, 49, 0]])
    x = activations(1, 3)
    got = run(made, x, ids)
    # 72 is no multiple of 64: the rows are stored longer and cut.
    np.testing.assert_array_equal(got["looked_up"], table[ids])
    np.testing.assert_allclose(got["logits"], (x + table[ids]) @ table.T, atol=2.0)
    assert np.abs(got["logits"] - (x + table[ids]) @ table.T).mean() < 0.1


def test_what_the_weights_are_for_is_read_from_the_graph() -> None:
    found = {w.name: w for w in find_linears([small_graph()])}
    assert list(found) == ["embed", "first", "second"]
    tied = found["embed"]
    assert (tied.is_linear, tied.is_embedding, tied.is_head) == (True, True, True)
    assert (tied.rows, tied.columns, tied.parts) == (VOCAB, HIDDEN, ("embed",))
    plain = found["first"]
    assert (plain.is_linear, plain.is_embedding, plain.is_head) == (True, False, False)


def test_other_products_and_lookups_are_left_alone() -> None:
    scaled = TEXT.replace("<transB = 1> (x, first)", "<transB = 1, alpha = 0.5> (x, first)")
    assert [w.name for w in find_linears([small_graph(scaled)])] == ["embed", "second"]
    other = TEXT.replace("Gather (embed", "Gather <axis = 1> (embed")
    (tied,) = (w for w in find_linears([small_graph(other)]) if w.name == "embed")
    assert not tied.is_embedding


def test_a_packed_weight_is_made_of_its_parts_rows(tmp_path: Path) -> None:
    arrays = weights()
    parts = {"first.x": arrays["first"][:13], "first.y": arrays["first"][13:]}
    model = small_graph(packed={"first": list(parts)})
    plan = FormatPlan(decode="int8_block64")
    packed, _, _ = session(model, "decode", plan, tmp_path, arrays | parts)
    x = activations(1, 2)
    got = run(packed, x)["a"]
    whole, _, _ = session(small_graph(), "decode", plan, tmp_path)
    np.testing.assert_array_equal(got, run(whole, x)["a"])


# The graphs of a model


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize(("quantize", "prefill"), [("int8", "w8a8"), ("int4", "int4_block32")])
def test_every_projection_of_a_model_is_rewritten(
    fresh_graphs: Callable[[], Graphs], quantize: str, prefill: str
) -> None:
    graphs = fresh_graphs()
    before = [kinds(m)["FusedMatMul"] for m in graphs.models]
    made: Prepared = prepare(graphs, quantize, "float32")
    assert [kinds(m)["FusedMatMul"] for m in made.graphs.models] == [0, 0]
    assert [kinds(m)["FusedMatMul"] for m in graphs.models] == before, "the originals stay"
    assert made.plan.prefill == prefill
    counts = made.graphs.counts
    for phase, count in zip(("prefill", "decode"), before, strict=True):
        formats = Counter(
            {made.plan.prefill if phase == "prefill" else made.plan.decode: count - 1}
        )
        formats[made.plan.lm_head] += 1
        assert {k: counts[f"{phase}.{k}"] for k in formats} == formats, "lm_head is int8"
        assert counts[f"{phase}.{made.plan.embedding}.embedding"] == 1
    assert not [t for t in made.stored if t.recipe.format is None and t.recipe.shape]


def test_stored_tensors_are_the_graphs_initializers(fresh_graphs: Callable[[], Graphs]) -> None:
    made = prepare(fresh_graphs(), "int8", "float32")
    names = {
        name
        for model in made.graphs.models
        for name, value in model.graph.initializers.items()
        if value.const_value is None
    }
    assert names <= {s.name for s in made.stored}
    by_name = {s.name: s for s in made.stored}
    for model in made.graphs.models:
        for name, value in model.graph.initializers.items():
            if value.const_value is None:
                assert value.shape == ir.Shape(by_name[name].shape), name


def test_sizes_count_every_byte_once(fresh_graphs: Callable[[], Graphs]) -> None:
    made = prepare(fresh_graphs(), "int8", "float32")
    sizes = {s.format: s for s in made.sizes}
    assert set(sizes) == {"int8_block32", "w8a8", "float32"}
    total = sum(s.nbytes for s in made.sizes)
    apart = [s for s in made.stored if s.same_bytes_as is None]
    assert total == sum(s.nbytes for s in apart)
    assert layout(made.stored)[1] <= total + 4096 * len(apart)
    assert 1.0 < sizes["w8a8"].bytes_per_weight < sizes["int8_block32"].bytes_per_weight < 1.7


def test_not_quantizing_changes_nothing(fresh_graphs: Callable[[], Graphs]) -> None:
    graphs = fresh_graphs()
    made = prepare(graphs, "none", "float32")
    assert [kinds(m) for m in made.graphs.models] == [kinds(m) for m in graphs.models]
    assert [s.name for s in made.stored] == list(graphs.weights)
    assert made.plan == FormatPlan()


def test_a_request_that_no_weight_can_follow_is_refused(
    fresh_graphs: Callable[[], Graphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = fresh_graphs()
    graphs = replace(graphs, target=replace(graphs.target, dequantizes=True))
    monkeypatch.setattr(apply, "plan_dequantized", lambda *args: FormatPlan())
    with pytest.raises(UsageError, match="--quantize int8: blocks divide the inputs of no layer"):
        prepare(graphs, "int8", "float16")
    assert not [s for s in prepare(graphs, "none", "float16").stored if s.recipe.format]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_small_weights_lose_no_more_than_large_ones(tmp_path: Path, dtype: str) -> None:
    """As the file has them: float16 has few digits for scales so small."""
    model = small_graph()
    plan = FormatPlan(decode="int8_block32")
    _, stored = quantize_graph(model, "decode", plan, find_linears([model]), dtype)
    arrays = {n: a / np.abs(a).max() * np.float32(1e-4) for n, a in weights().items()}
    source = MappedSource(Memory(arrays), {n: n for n in arrays})
    stored = in_order(stored, list(arrays))
    write_weights(tmp_path / "w.bin", stored, source, RoundToNearest(), NoProgress())
    places, raw = layout(stored)[0], (tmp_path / "w.bin").read_bytes()
    by_name = {s.name: s for s in stored}

    def read(name: str) -> Any:
        place, tensor = places[name], by_name[name]
        kind = np.dtype(NUMPY_DTYPES[tensor.dtype])
        flat = np.frombuffer(raw[place.offset : place.offset + place.length], kind)
        return flat.reshape(tensor.shape).astype(np.float32)

    want = arrays["first"]
    got = (read("first.q8") - 128) * read("first.q8_scale")[..., None]
    got = got.reshape(INNER, -1)[:, :HIDDEN]
    largest = np.abs(np.pad(want, ((0, 0), (0, 24))).reshape(INNER, 3, 32)).max(-1)
    # No step is finer than float16's finest.
    step = largest / 127 * 1.01 + (2.0**-24 if dtype == "float16" else 0)
    allowed = 0.501 * step.repeat(32, 1)[:, :HIDDEN]
    assert (np.abs(got - want) <= allowed).all()
