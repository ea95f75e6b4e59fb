"""Opening bundles with ONNX Runtime: what is refused, what a session says of itself.

The graph is the smallest that keeps the contract: its logits are the first cached key of a row.
"""

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save_model

from trtllm_lite.runtime.backends import open_session as open_by_target
from trtllm_lite.runtime.backends.base import Batch, SessionOptions, Spin
from trtllm_lite.runtime.backends.onnxruntime import open_session
from trtllm_lite.runtime.backends.ort_session import MAX_BINDINGS
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import (
    BundleError,
    EngineDeadError,
    MissingExtraError,
    StepError,
    UsageError,
)
from trtllm_lite.runtime.manifest import (
    GraphSpec,
    KVLayer,
    KVSpec,
    Limits,
    Manifest,
    Phase,
    TensorSpec,
)

DIM = 8
TYPES = {
    "float32": TensorProto.FLOAT,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}
PHASES: tuple[Phase, ...] = ("prefill", "decode")
MakeBundle = Callable[..., Bundle]


def make_table(phase: Phase, dtype: str, capacity: int | str) -> GraphSpec:
    cache = ("batch", 1, capacity, DIM)
    inputs = [
        TensorSpec("input_ids", "input_ids", "int64", ("batch", "seq")),
        TensorSpec("past_lens", "past_lens", "int32", ("batch",)),
        TensorSpec("past_key_0", "past_key", dtype, cache, 0),
        TensorSpec("past_value_0", "past_value", dtype, cache, 0),
    ]
    if phase == "prefill":
        inputs.append(TensorSpec("query_lens", "query_lens", "int32", ("batch",)))
        inputs.append(TensorSpec("logits_indices", "logits_indices", "int64", ("batch", 1)))
    outputs = (
        TensorSpec("logits", "logits", "float32", ("batch", 1, DIM)),
        TensorSpec("present_key_0", "present_key", dtype, cache, 0),
        TensorSpec("present_value_0", "present_value", dtype, cache, 0),
    )
    return GraphSpec(phase, f"{phase}.onnx", tuple(inputs), outputs)


def save_graph(folder: Path, table: GraphSpec) -> None:
    constants = {"from": [0], "to": [1], "axis": [2], "shape": [0, 1, DIM]}
    nodes = [helper.make_node("Constant", [], [n], value_ints=v) for n, v in constants.items()]
    nodes.append(helper.make_node("Slice", ["past_key_0", "from", "to", "axis"], ["first"]))
    nodes.append(helper.make_node("Cast", ["first"], ["float"], to=TensorProto.FLOAT))
    nodes.append(helper.make_node("Reshape", ["float", "shape"], ["logits"]))
    for part in ("key", "value"):
        nodes.append(helper.make_node("Identity", [f"past_{part}_0"], [f"present_{part}_0"]))
    sides = [
        [helper.make_tensor_value_info(t.name, TYPES[t.dtype], t.shape) for t in side]
        for side in (table.inputs, table.outputs)
    ]
    graph = helper.make_graph(nodes, table.phase, *sides)
    opsets = [helper.make_opsetid("", 24)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    save_model(model, folder / table.file)


@pytest.fixture(scope="module")
def make_bundle(make_manifest: Callable[..., Manifest]) -> MakeBundle:
    def made(folder: Path, dtype: str = "float32", capacity: int | str = "capacity") -> Bundle:
        tables = [make_table(phase, dtype, capacity) for phase in PHASES]
        for table in tables:
            save_graph(folder, table)
        kv = KVSpec(dtype, (KVLayer(1, DIM),))
        sizes = {"hidden_size": DIM, "vocab_size": DIM}
        return Bundle(folder, make_manifest("cpu", tables, kv, Limits(4, 64), dtype=dtype, **sizes))

    return made


def one_token(slot: int, rows: int = 1) -> Batch:
    zeros, column = np.zeros(rows, np.int32), np.zeros((rows, 1), np.int64)
    return Batch("decode", slot, column, zeros, zeros + 1, zeros + 1, column)


@pytest.fixture(scope="module")
def bundle(make_bundle: MakeBundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("bundle"))


def test_a_bfloat16_cache_is_bound_as_bfloat16(make_bundle: MakeBundle, tmp_path: Path) -> None:
    session = open_session(make_bundle(tmp_path, "bfloat16"), SessionOptions(2, 4))
    values = np.arange(DIM, dtype=np.float32) - 3
    session.pool.keys[0][1, 0, 0] = values.view(np.uint32) >> 16
    np.testing.assert_array_equal(session.run(one_token(1))[0, 0], values)


def test_bindings_are_bounded_and_right_after_eviction(bundle: Bundle) -> None:
    slots = 12
    session = open_session(bundle, SessionOptions(slots, 4))
    keys = session.pool.keys[0]
    keys[:, 0, 0] = np.arange(slots * DIM).reshape(slots, DIM)
    for _ in range(2):
        for first in range(slots):
            for rows in range(1, slots - first + 1):
                logits = session.run(one_token(first, rows))
                np.testing.assert_array_equal(logits[:, 0], keys[first : first + rows, 0, 0])
    assert len(session._bindings) == MAX_BINDINGS


def test_logits_are_a_view_that_the_next_run_overwrites(bundle: Bundle) -> None:
    session = open_session(bundle, SessionOptions(2, 4))
    session.pool.keys[0][1] = 5
    first = session.run(one_token(0))
    assert (first == 0).all()
    assert np.shares_memory(first, session.run(one_token(1)))
    assert (first == 5).all()


def test_a_batch_outside_the_slots_never_runs(bundle: Bundle) -> None:
    session = open_session(bundle, SessionOptions(2, 4))
    with pytest.raises(StepError, match="first_slot"):
        session.run(one_token(1, rows=2))


def test_a_graph_of_fixed_capacity_refuses_any_other(
    make_bundle: MakeBundle, tmp_path: Path
) -> None:
    bundle = make_bundle(tmp_path, capacity=16)
    with pytest.raises(UsageError, match=r"capacity: got 8.*16 tokens"):
        open_session(bundle, SessionOptions(2, 8))
    open_session(bundle, SessionOptions(2, 16)).close()


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_table_that_lies_about_its_graph_is_refused(bundle: Bundle, side: str) -> None:
    prefill, decode = bundle.manifest.graphs
    first, *rest = getattr(decode, side)
    tensors = (replace(first, name="elsewhere"), *rest)
    lying = (
        replace(decode, inputs=tensors) if side == "inputs" else replace(decode, outputs=tensors)
    )
    manifest = replace(bundle.manifest, graphs=(prefill, lying))
    with pytest.raises(BundleError, match="elsewhere") as caught:
        open_session(Bundle(bundle.folder, manifest), SessionOptions(2, 8))
    assert caught.value.field == f"graphs[1].{side}"


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "paged"), ("float16", "slots")])
def test_a_cache_that_the_backend_cannot_bind_is_refused(
    bundle: Bundle, dtype: str, layout: str
) -> None:
    manifest = replace(bundle.manifest, kv=KVSpec(dtype, bundle.manifest.kv.layers, layout))
    with pytest.raises(BundleError):
        open_session(Bundle(bundle.folder, manifest), SessionOptions(2, 8))


def test_another_target_is_refused(bundle: Bundle) -> None:
    other = Bundle(bundle.folder, replace(bundle.manifest, target="cuda"))
    with pytest.raises(BundleError, match="this backend runs cpu, tensorrt"):
        open_session(other, SessionOptions(2, 8))


@pytest.mark.parametrize("content", [None, b"not a graph"])
def test_a_missing_or_damaged_graph_is_refused_by_field(
    bundle: Bundle, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "prefill.onnx").write_bytes(content)
    with pytest.raises(BundleError) as caught:
        open_session(Bundle(tmp_path, bundle.manifest), SessionOptions(2, 8))
    assert caught.value.field == "graphs[0].file"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [(0, 8, 1), (2, 0, 1), (2, 8, 0), (2, 8, -1)])
def test_options_below_one_are_refused(bundle: Bundle, options: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="integers from 1"):
        open_session(bundle, SessionOptions(*options))


def test_a_pool_beyond_the_address_space_is_refused(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="lower max_num_seqs"):
        open_session(bundle, SessionOptions(2**20, 2**40, 1))


def test_a_missing_or_old_onnxruntime_names_the_extra(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"trtllm-lite\[cpu\]"):
        open_session(bundle, SessionOptions(2, 8))
    old = types.ModuleType("onnxruntime")
    old.__dict__["__version__"] = "1.31.1"
    monkeypatch.setitem(sys.modules, "onnxruntime", old)
    with pytest.raises(MissingExtraError, match=r"found 1\.31\.1"):
        open_session(bundle, SessionOptions(2, 8))


@pytest.mark.parametrize(
    ("spin", "allowed", "microseconds"),
    [("off", "0", None), ("brief", "1", "100"), ("long", "1", "2000")],
)
def test_thread_options_reach_both_graphs(
    bundle: Bundle, spin: Spin, allowed: str, microseconds: str | None
) -> None:
    session = open_session(bundle, SessionOptions(2, 8, intra_op_num_threads=3, spin=spin))
    for phase in PHASES:
        options = session._graphs[phase].session.get_session_options()
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == allowed
        if microseconds is not None:
            entry = options.get_session_config_entry("session.intra_op.spin_duration_us")
            assert entry == microseconds
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)
    assert session.info.spin == spin


def test_a_session_without_prefill_decodes_only(bundle: Bundle) -> None:
    session = open_session(bundle, SessionOptions(2, 8, phases=("decode",)))
    assert session.run(one_token(0)).shape == (1, 1, DIM)
    prefill = replace(one_token(0), phase="prefill")
    with pytest.raises(StepError, match="without the prefill graph"):
        session.run(prefill)
    with pytest.raises(UsageError, match="'decode' is always needed"):
        open_session(bundle, SessionOptions(2, 8, phases=("prefill",)))


def test_small_inputs_of_one_shape_are_bound_once(bundle: Bundle) -> None:
    session = open_session(bundle, SessionOptions(2, 4))
    session.run(one_token(0))
    first = dict(session._bindings["decode", 0, 1].inputs)
    session.run(one_token(0))
    second = session._bindings["decode", 0, 1].inputs
    assert set(first) == {"input_ids", "past_lens"}
    assert all(second[name] is array for name, array in first.items())


def test_info_and_close(bundle: Bundle) -> None:
    session = open_by_target(bundle, SessionOptions(2, 8, intra_op_num_threads=1))
    assert (session.info.backend, session.info.device) == ("onnxruntime", "cpu")
    assert session.info.intra_op_num_threads == 1
    assert session.info.kv_bytes_per_token == 2 * DIM * 4
    session.close()
    session.close()
    with pytest.raises(EngineDeadError):
        session.run(one_token(0))
    with pytest.raises(EngineDeadError):
        session.release(0)
