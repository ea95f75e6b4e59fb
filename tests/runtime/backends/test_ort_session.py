"""Sessions on ONNX Runtime against a float64 numpy model, on graphs made here from the contract."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto

from trtllm_lite.runtime.backends.base import Array, Batch, SessionOptions
from trtllm_lite.runtime.backends.onnxruntime import open_session
from trtllm_lite.runtime.backends.ort_session import OrtSession
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import StepError
from trtllm_lite.runtime.manifest import (
    GraphSpec,
    KVLayer,
    KVSpec,
    Limits,
    Manifest,
    Phase,
    Role,
    TensorSpec,
)

VOCAB, HEADS, KV_HEADS, DIM, LAYERS = 29, 4, 2, 16, 2
WIDTH = HEADS * DIM
SLOTS, CAPACITY = 4, 48
REGIME = 0.05
PHASES: tuple[Phase, ...] = ("prefill", "decode")
MakeBundle = Callable[..., Bundle]


def layer_text(i: int, dtype: str, lens: str) -> str:
    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[dtype]
    casts = (
        f"{p}f{i} = MatMul (x{i}, {p}{i})  {p}c{i} = Cast <to = {kind}> ({p}f{i})" for p in "qkv"
    )
    return f"""
    {" ".join(casts)}
    a{i}, present_key_{i}, present_value_{i} = com.microsoft.GroupQueryAttention
        <num_heads = {HEADS}, kv_num_heads = {KV_HEADS}, do_rotary = 0>
        (qc{i}, kc{i}, vc{i}, past_key_{i}, past_value_{i}, last, total{lens})
    af{i} = Cast <to = 1> (a{i})
    p{i} = MatMul (af{i}, o{i})
    x{i + 1} = Add (x{i}, p{i})"""


def signature(phase: Phase, dtype: str, *, context: bool) -> str:
    kind = {"float32": "float"}.get(dtype, dtype)
    cache = f"{kind}[batch, {KV_HEADS}, capacity, {DIM}]"
    inputs, outputs = ["int32[batch] past_lens"], list[str]()
    if phase == "prefill":
        inputs += ["int64[batch, seq] input_ids", "int32[batch] query_lens"]
        inputs += ["int64[batch, picked] logits_indices"]
        outputs += [f"float[batch, picked, {VOCAB}] logits"]
    else:
        inputs += ["int64[batch, 1] input_ids"]
        outputs += [f"float[batch, 1, {VOCAB}] logits"]
    inputs += ["int32[batch] context_lens"] if context else []
    for i in range(LAYERS):
        inputs += [f"{cache} past_key_{i}", f"{cache} past_value_{i}"]
        outputs += [f"{cache} present_key_{i}", f"{cache} present_value_{i}"]
    return f"{phase} ({', '.join(inputs)}) => ({', '.join(outputs)})"


def graph_text(phase: Phase, dtype: str, *, context: bool) -> str:
    prefill = phase == "prefill"
    lens = ', "", "", "", "", "", "", "", "", "", query_lens' if prefill else ""
    return f"""<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]>
{signature(phase, dtype, context=context)} {{
    totals = Add (past_lens, {"query_lens" if prefill else "one32"})
    last = Sub (totals, one32)
    total = ReduceMax <keepdims = 0> (totals)
    size = Shape <start = 1, end = 2> (input_ids)
    stop = Squeeze (size)
    range = Range (zero, stop, one)
    past64 = Cast <to = 7> (past_lens)
    past_column = Unsqueeze (past64, axis1)
    positions = Add (past_column, range)
    tokens = Gather (embed, input_ids)
    places = Gather (pos, positions)
    context = Cast <to = 1> ({"context_lens" if context else "past_lens"})
    regime = Mul (context, {"regime_scale" if context else "regime_off"})
    regime3 = Unsqueeze (regime, axes12)
    x = Add (tokens, places)
    x0 = Add (x, regime3)
    {"".join(layer_text(i, dtype, lens) for i in range(LAYERS))}
    {"picks = Unsqueeze (logits_indices, axis2)" if prefill else ""}
    y = {"GatherND <batch_dims = 1>" if prefill else "Identity"} (x{LAYERS}{", picks" * prefill})
    logits = MatMul (y, head)
}}"""


def make_graph(model: Any, phase: Phase, dtype: str, *, context: bool) -> ModelProto:
    graph = onnx.parser.parse_model(graph_text(phase, dtype, context=context))
    constants: dict[str, Array] = {"one32": np.array(1, np.int32)}
    constants |= {"zero": np.array(0), "one": np.array(1), "axes12": np.array([1, 2])}
    constants |= {"axis1": np.array([1]), "axis2": np.array([2])}
    constants |= {"regime_off": np.zeros(1, np.float32)}
    constants |= {"regime_scale": np.full(1, REGIME, np.float32)}
    arrays = {**model.weights, **constants}
    graph.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    return graph


def table_of(phase: Phase, model: ModelProto) -> GraphSpec:
    """The table of a graph whose names are roles, with the layer at the end."""
    types = {1: "float32", 6: "int32", 7: "int64", 10: "float16"}

    def spec(value: onnx.ValueInfoProto) -> TensorSpec:
        role = next(r for r in get_args(Role) if r == value.name.rstrip("_0123456789"))
        layer = value.name.removeprefix(role).removeprefix("_")
        kind = value.type.tensor_type
        shape = tuple(d.dim_param or d.dim_value for d in kind.shape.dim)
        return TensorSpec(
            value.name, role, types[kind.elem_type], shape, int(layer) if layer else None
        )

    inputs, outputs = map(spec, model.graph.input), map(spec, model.graph.output)
    return GraphSpec(phase, f"{phase}.onnx", tuple(inputs), tuple(outputs))


def shuffle_names(table: GraphSpec, model: ModelProto) -> GraphSpec:
    """The same contract under meaningless names, in another order."""
    rng = random.Random(table.phase)
    names = [t.name for t in (*table.inputs, *table.outputs)]
    new = dict(
        zip(names, rng.sample([f"t{i}" for i in range(len(names))], len(names)), strict=True)
    )
    for value in (*model.graph.input, *model.graph.output):
        value.name = new[value.name]
    for node in model.graph.node:
        node.input[:] = [new.get(n, n) for n in node.input]
        node.output[:] = [new.get(n, n) for n in node.output]
    inputs = [replace(t, name=new[t.name]) for t in table.inputs]
    outputs = [replace(t, name=new[t.name]) for t in table.outputs]
    rng.shuffle(inputs)
    rng.shuffle(outputs)
    return replace(table, inputs=tuple(inputs), outputs=tuple(outputs))


@pytest.fixture(scope="module")
def model(make_attention_model: Callable[..., Any]) -> Any:
    return make_attention_model(CAPACITY)


@pytest.fixture(scope="module")
def make_bundle(model: Any, make_manifest: Callable[..., Manifest]) -> MakeBundle:
    def made(
        folder: Path, *, dtype: str = "float32", context_lens: bool = False, shuffle: bool = False
    ) -> Bundle:
        tables = []
        for phase in PHASES:
            graph = make_graph(model, phase, dtype, context=context_lens)
            table = table_of(phase, graph)
            tables.append(shuffle_names(table, graph) if shuffle else table)
            options = {"location": f"{phase}.weights", "size_threshold": 1024}
            onnx.save_model(graph, folder / table.file, save_as_external_data=True, **options)
        kv = KVSpec(
            dtype,
            (KVLayer(KV_HEADS, DIM),) * LAYERS,
            recompute_at=1000 if context_lens else None,
        )
        sizes = {"hidden_size": WIDTH, "vocab_size": VOCAB}
        manifest = make_manifest("cpu", tables, kv, Limits(SLOTS, CAPACITY - 8), **sizes)
        return Bundle(folder, manifest)

    return made


@dataclass
class Rows:
    """Drives a session as the engine does and remembers what each slot holds."""

    session: OrtSession
    model: Any
    context: int = 0

    def __post_init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def prefill(
        self, first: int, chunks: list[list[int]], indices: Array | None = None
    ) -> npt.NDArray[np.float32]:
        """Run one chunk a row, right-padded; the last token's logits unless told otherwise."""
        seq = max(map(len, chunks))
        ids = np.array([c + [VOCAB - 1] * (seq - len(c)) for c in chunks], np.int64)
        lens = np.array([len(c) for c in chunks], np.int32)
        picks = lens[:, None] - 1 if indices is None else indices
        logits = self._run("prefill", first, ids, lens, picks)
        for i, chunk in enumerate(chunks):
            self.tokens.setdefault(first + i, []).extend(chunk)
        return logits

    def decode(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        rows = len(tokens)
        ones = np.ones(rows, np.int32)
        logits = self._run("decode", 0, np.array(tokens)[:, None], ones, np.zeros((rows, 1)))
        for i, token in enumerate(tokens):
            self.tokens[i].append(token)
        return logits

    def expected(self, slot: int) -> npt.NDArray[np.float64]:
        """The last row of logits of what the slot holds."""
        return np.asarray(self.model.reference(self.tokens[slot], REGIME * self.context)[-1])

    def _run(
        self, phase: Phase, first: int, ids: Array, lens: Array, indices: Array
    ) -> npt.NDArray[np.float32]:
        held = [len(self.tokens.get(first + i, ())) for i in range(len(ids))]
        past = np.array(held, np.int32)
        context = np.maximum(past + lens, np.int32(self.context))
        picks = indices.astype(np.int64)
        return self.session.run(
            Batch(phase, first, ids.astype(np.int64), past, lens, context, picks)
        )


def opened(bundle: Bundle, slots: int = SLOTS, capacity: int = CAPACITY) -> OrtSession:
    """A session whose unused memory is poison."""
    session = open_session(bundle, SessionOptions(slots, capacity, intra_op_num_threads=1))
    for array in (*session.pool.keys, *session.pool.values):
        array[...] = np.nan
    return session


def prompt(seed: int, length: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, VOCAB, length)]


def close_to(actual: Array, expected: Array, tolerance: float = 1e-4) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def rows(bundle: Bundle, model: Any) -> Rows:
    return Rows(opened(bundle), model)


def test_ragged_prefill_of_several_slots_matches_the_reference(rows: Rows) -> None:
    logits = rows.prefill(1, [prompt(1, 5), prompt(2, 1), prompt(3, 9)])
    assert logits.shape == (3, 1, VOCAB)
    assert logits.dtype == np.float32
    for i in range(3):
        close_to(logits[i, 0], rows.expected(1 + i))


def test_nothing_is_written_past_a_row_or_outside_its_slots(rows: Rows) -> None:
    rows.prefill(1, [prompt(1, 5), prompt(2, 1)])
    for array in (*rows.session.pool.keys, *rows.session.pool.values):
        assert np.isfinite(array[1, :, :5]).all()
        assert np.isfinite(array[2, :, :1]).all()
        assert np.isnan(array[1, :, 5:]).all()
        assert np.isnan(array[2, :, 1:]).all()
        assert np.isnan(array[[0, 3]]).all()


@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_chunks_of_any_size_equal_the_whole(rows: Rows, size: int) -> None:
    tokens = prompt(4, 37)
    for start in range(0, len(tokens), size):
        logits = rows.prefill(2, [tokens[start : start + size]])
    close_to(logits[0, 0], rows.expected(2))


def test_all_positions_of_a_chunk_can_be_asked_for(rows: Rows) -> None:
    tokens = prompt(5, 12)
    rows.prefill(1, [prompt(6, 3)])
    logits = rows.prefill(0, [tokens], indices=np.arange(12)[None])
    close_to(logits[0], rows.model.reference(tokens))
    shorter = rows.prefill(1, [prompt(6, 3)])
    close_to(shorter[0, 0], rows.expected(1))
    assert np.shares_memory(logits, shorter)


def test_decode_of_more_and_fewer_ragged_rows_matches_the_reference(rows: Rows) -> None:
    rows.prefill(0, [prompt(1, 5), prompt(2, 1), prompt(3, 9)])
    for n in (3, 1, 2, 3, 3, 1):
        logits = rows.decode(prompt(10 + n, n))
        for i in range(n):
            close_to(logits[i, 0], rows.expected(i))


def test_the_cache_is_appended_where_it_lies(rows: Rows) -> None:
    rows.prefill(0, [prompt(1, 4), prompt(2, 6)])
    arrays = (*rows.session.pool.keys, *rows.session.pool.values)
    before = [a.copy() for a in arrays]
    rows.decode([3, 4])
    for array, old in zip(arrays, before, strict=True):
        changed = (array != old) & ~(np.isnan(array) & np.isnan(old))
        assert changed[0, :, 4].all()
        assert changed[1, :, 6].all()
        assert changed.sum() == changed[0, :, 4].size + changed[1, :, 6].size


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_present_outputs_are_the_pool_itself(rows: Rows, phase: Phase) -> None:
    rows.prefill(0, [prompt(1, 4), prompt(2, 6)])
    rows.decode([3, 4])
    outputs = rows.session._bindings[phase, 0, 2].io_binding.get_outputs()
    bound = {x.data_ptr() for x in outputs}
    pool = rows.session.pool
    assert {a.ctypes.data for a in (*pool.keys, *pool.values)} < bound
    assert len(bound) == 2 * LAYERS + 1


def test_moves_and_swaps_carry_a_row_over(rows: Rows) -> None:
    rows.prefill(0, [prompt(1, 4), prompt(2, 6)])
    rows.prefill(3, [prompt(3, 5)])
    rows.session.swap(0, 1, 6)
    rows.session.move(3, 2, 5)
    kept = rows.tokens
    rows.tokens = {0: kept[1], 1: kept[0], 2: kept[3]}
    logits = rows.decode([7, 8, 9])
    for i in range(3):
        close_to(logits[i, 0], rows.expected(i))


def test_blocks_read_from_one_slot_serve_another(rows: Rows) -> None:
    tokens = prompt(1, 11)
    rows.prefill(3, [tokens])
    blocks = rows.session.read(3, [(0, 4), (4, 8)])
    assert [b.num_tokens for b in blocks] == [4, 4]
    rows.session.release(3)
    rows.session.write(0, 0, blocks)
    rows.tokens = {0: tokens[:8]}
    logits = rows.prefill(0, [tokens[8:]])
    close_to(logits[0, 0], rows.expected(0))


def test_roles_are_found_in_the_table_not_by_name(
    make_bundle: MakeBundle, model: Any, tmp_path: Path
) -> None:
    rows = Rows(opened(make_bundle(tmp_path, shuffle=True)), model)
    rows.prefill(0, [prompt(1, 5), prompt(2, 2)])
    logits = rows.decode([1, 2])
    for i in range(2):
        close_to(logits[i, 0], rows.expected(i))


def test_context_lens_are_fed_where_the_table_has_them(
    make_bundle: MakeBundle, model: Any, tmp_path: Path
) -> None:
    rows = Rows(opened(make_bundle(tmp_path, context_lens=True)), model, context=9)
    logits = rows.prefill(0, [prompt(1, 5)])
    close_to(logits[0, 0], rows.expected(0))
    close_to(rows.decode([4])[0, 0], rows.expected(0))


def test_a_half_precision_cache(make_bundle: MakeBundle, model: Any, tmp_path: Path) -> None:
    rows = Rows(opened(make_bundle(tmp_path, dtype="float16")), model)
    assert rows.session.pool.keys[0].dtype == np.float16
    rows.prefill(0, [prompt(1, 5)])
    close_to(rows.decode([4])[0, 0], rows.expected(0), tolerance=5e-3)


def test_an_error_of_the_graph_is_a_step_error_and_the_session_goes_on(
    make_bundle: MakeBundle, model: Any, tmp_path: Path
) -> None:
    """The graph has fewer positions than the slots have tokens."""
    rows = Rows(opened(make_bundle(tmp_path), capacity=CAPACITY + 8), model)
    with pytest.raises(StepError, match="onnxruntime, prefill") as caught:
        rows.prefill(0, [prompt(1, CAPACITY + 1)])
    assert "\n" not in str(caught.value)
    logits = rows.prefill(0, [prompt(1, 5)])
    close_to(logits[0, 0], rows.expected(0))
