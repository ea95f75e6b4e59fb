"""Plans of TensorRT-RTX that do not hold copies of the weights: matrices as inputs, and one plan
for all phases."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.bundle_files import describe_file
from trtllm_lite.runtime.engines.attention_patch import BuildError, Patched
from trtllm_lite.runtime.engines.engine_builder import BuildReport, build_engines
from trtllm_lite.runtime.engines.engine_key import BuildOptions, engine_key, weights_to_share
from trtllm_lite.runtime.engines.plan_builder import BuiltPlan, PlanRequest, check_network
from trtllm_lite.runtime.engines.profiles import EngineLimits, profiles_of_single
from trtllm_lite.runtime.engines.record import SharedWeight
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.engines.weight_inputs import shared_weights, with_weights_as_inputs
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.runtime.protobuf import WireError

LIMITS = EngineLimits(4, 64, 64)
EngineGraph = Callable[..., onnx.ModelProto]


def with_graphs(bundle: Bundle, engine_graph: EngineGraph, quantized: str) -> Bundle:
    """The bundle with its matrices in this format."""
    folder, options = bundle.folder, {"location": "weights.bin", "size_threshold": 100}
    for graph in bundle.manifest:
        (folder / "weights.bin").unlink()
        model = engine_graph(graph.phase, quantized)
        for tensor in model.graph.initializer:
            # Raw bytes alone are kept in another file.
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
        onnx.save_model(model, folder / graph.file, save_as_external_data=True, **options)
    files = tuple(describe_file(folder, entry.path) for entry in bundle.manifest.files)
    return Bundle(folder, replace(bundle.manifest, files=files))


def build(bundle: Bundle, trt: TensorRT, gpus: tuple[str, ...], **way: Any) -> BuildReport:
    return build_engines(bundle, BuildOptions(gpus, LIMITS, **way), trt, NoProgress())


@pytest.mark.parametrize(
    ("quantized", "gpus"),
    [("", ("sm86", "sm89", "sm120")), ("int8", ("sm86",)), ("fp8", ("sm89",))],
)
def test_plans_with_shared_weights_hold_none(
    rtx: TensorRT,
    engine_bundle: Bundle,
    engine_graph: EngineGraph,
    quantized: str,
    gpus: tuple[str, ...],
) -> None:
    bundle = with_graphs(engine_bundle, engine_graph, quantized)
    report = build(bundle, rtx, gpus, share_weights=True)
    graph = onnx.load(bundle.graph_path("decode"), load_external_data=False).graph
    big = [t for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    total = sum(int(e.value) for t in big for e in t.external_data if e.key == "length")
    assert report.ledger.shared_weights == total
    assert {w.name for w in report.engine.record.weights} == {t.name for t in big}
    for plan in report.engine.record.plans:
        assert plan.weights_bytes is not None
        assert plan.weights_bytes < total // 10
    assert report.ledger.weights < 1.3 * total
    patched = {p.phase: (p.attention_layers, p.lengths_set) for p in report.engine.record.plans}
    assert patched == {"prefill": (2, 0), "decode": (2, 2), "extend": (2, 2)}


@pytest.mark.parametrize("quantized", ["", "int4"])
@pytest.mark.parametrize("slots", [1, 4])
def test_a_single_engine_holds_its_weights_once(
    rtx: TensorRT, engine_bundle: Bundle, engine_graph: EngineGraph, slots: int, quantized: str
) -> None:
    """Also for one slot: a profile of one row alone would get weights in an order of its own."""
    bundle = with_graphs(engine_bundle, engine_graph, quantized)
    options = BuildOptions(("sm86", "sm120"), EngineLimits(slots, 64, 64), single_engine=True)
    report = build_engines(bundle, options, rtx, NoProgress())
    (plan,) = report.engine.record.plans
    patched = (plan.attention_layers, plan.lengths_set, plan.lower_right)
    assert (plan.phase, *patched) == ("extend", 2, 2, 2)
    (phase,) = report.ledger.phases
    assert phase.weights is not None
    # Scales of blocks may be kept in fewer bytes than the file has.
    assert 0.9 * phase.file_weights < phase.weights < 1.1 * phase.file_weights
    (key,) = report.engine.record.key.graphs
    assert len(key.profiles) == 2


def test_profiles_of_a_single_engine_are_steps_then_chunks(engine_bundle: Bundle) -> None:
    steps, chunks = profiles_of_single(engine_bundle.manifest.graph("extend"), LIMITS)
    ranges = {d.name: (d.min, d.opt, d.max) for d in steps.dims}
    assert ranges == {"batch": (1, 4, 4), "seq": (1, 1, 1), "num_logits": (1, 1, 1)}
    assert chunks.holds({"batch": 4, "seq": 64, "num_logits": 32})
    assert chunks.holds({"batch": 1, "seq": 1, "num_logits": 1})
    for box in profiles_of_single(engine_bundle.manifest.graph("extend"), EngineLimits(1, 64, 64)):
        rows = box.range_of("batch")
        assert rows is not None
        assert (rows.min, rows.opt, rows.max) == (1, 1, 2)


def test_a_plan_that_holds_its_weights_twice_is_told(engine_bundle: Bundle) -> None:
    said: list[str] = []

    class Listening(NoProgress):
        def note(self, text: str) -> None:
            said.append(text)

    def fake(size: int) -> Callable[..., BuiltPlan]:
        def build(trt: TensorRT, request: PlanRequest, progress: Any) -> BuiltPlan:
            return BuiltPlan(memoryview(b"plan"), Patched(2, 2, 2), False, size, 1, 1)

        return build

    options = BuildOptions(("sm86",), LIMITS, single_engine=True, force=True)
    trt = TensorRT(object(), "tensorrt_rtx", "1.7")
    once = (engine_bundle.folder / "weights.bin").stat().st_size
    build_engines(engine_bundle, options, trt, Listening(), fake(once + 4096))
    assert not said
    build_engines(engine_bundle, options, trt, Listening(), fake(2 * once))
    assert [text for text in said if "2.0 times the weights" in text]


def test_int4_weights_are_not_shared(engine_bundle: Bundle, engine_graph: EngineGraph) -> None:
    bundle = with_graphs(engine_bundle, engine_graph, "int4")
    options = BuildOptions(("sm86",), LIMITS, share_weights=True)
    trt = TensorRT(object(), "tensorrt_rtx", "1.7")
    key = engine_key(bundle, options, trt)
    with pytest.raises(UsageError, match=r"--share-weights: this bundle has int4 weights"):
        weights_to_share(bundle, key)
    with pytest.raises(UsageError, match="use --single-engine"):
        build_engines(bundle, options, trt, NoProgress())
    assert not list((bundle.folder / "engines").glob("*"))


@pytest.mark.parametrize(
    ("quantized", "gpus", "older", "least"),
    [("fp8", ("sm86", "sm89"), "sm86", 89), ("int4", ("sm75", "sm86"), "sm75", 80)],
)
def test_gpus_without_arithmetic_for_the_weights_are_refused(
    engine_bundle: Bundle,
    engine_graph: EngineGraph,
    quantized: str,
    gpus: tuple[str, ...],
    older: str,
    least: int,
) -> None:
    bundle = with_graphs(engine_bundle, engine_graph, quantized)
    trt = TensorRT(object(), "tensorrt_rtx", "1.7")
    with pytest.raises(UsageError, match=f"--gpu {older}: .*{quantized} weights.* need sm{least}"):
        engine_key(bundle, BuildOptions(gpus, LIMITS), trt)
    assert engine_key(bundle, BuildOptions(gpus[1:], LIMITS), trt).gpus == gpus[1:]


def test_graphs_with_weights_as_inputs_compute_the_same(engine_bundle: Bundle) -> None:
    """The float16 graph of decode by ONNX Runtime, its matrices constants and inputs."""
    path = engine_bundle.graph_path("decode")
    weights = shared_weights([path.read_bytes()])
    model = onnx.load_from_string(with_weights_as_inputs(path.read_bytes(), weights))
    onnx.checker.check_model(model, full_check=True)
    assert not {t.name for t in model.graph.initializer} & {w.name for w in weights}
    given = [v.name for v in model.graph.input]
    assert given[-len(weights) :] == [
        t.name
        for t in onnx.load(path, load_external_data=False).graph.initializer
        if t.name in {w.name for w in weights}
    ]
    arrays = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    feeds = inputs_of(path)
    outside = {w.name: arrays[w.name] for w in weights}
    (expected,) = logits(onnx.load(path), feeds)
    (got,) = logits(model, feeds | outside)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_array_equal(got, expected)


def tied(engine_graph: EngineGraph) -> onnx.ModelProto:
    """The decode graph with its embedding, turned, as its head."""
    model = engine_graph("decode")
    kept = [t for t in model.graph.initializer if t.name != "head"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    turn = onnx.helper.make_node("Transpose", ["embed"], ["head"], perm=[1, 0], name="turn")
    model.graph.node.insert(0, turn)
    return model


def test_a_matrix_that_two_nodes_read_is_an_input_of_each(
    engine_bundle: Bundle, engine_graph: EngineGraph
) -> None:
    path = engine_bundle.graph_path("decode")
    options = {"location": "tied.bin", "size_threshold": 1024, "convert_attribute": False}
    onnx.save_model(tied(engine_graph), path, save_as_external_data=True, **options)
    weights = shared_weights([path.read_bytes()])
    places = {w.name: (w.offset, w.length) for w in weights}
    assert places["embed"] == places["embed@1"]
    assert len(set(places.values())) == len(places) - 1
    model = onnx.load_from_string(with_weights_as_inputs(path.read_bytes(), weights))
    onnx.checker.check_model(model, full_check=True)
    readers = {n.name: list(n.input) for n in model.graph.node if "embed" in " ".join(n.input)}
    assert {name for name, read in readers.items() if "embed" in read} == {"turn"}
    assert {read[0] for name, read in readers.items() if name != "turn"} == {"embed@1"}
    arrays = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    feeds = inputs_of(path)
    (expected,) = logits(onnx.load(path), feeds)
    (got,) = logits(model, feeds | {w.name: arrays[w.name.split("@")[0]] for w in weights})
    np.testing.assert_array_equal(got, expected)


def test_a_tied_head_costs_no_copy_in_a_run(
    rtx: TensorRT, engine_bundle: Bundle, engine_graph: EngineGraph
) -> None:
    """Scratch of decode with constants, and with inputs."""
    graph = engine_bundle.manifest.graph("decode")
    bundle = replace(engine_bundle, manifest=replace(engine_bundle.manifest, graphs=(graph,)))
    options = {"location": "weights.bin", "size_threshold": 1024, "convert_attribute": False}
    (bundle.folder / "weights.bin").unlink()
    path = bundle.graph_path("decode")
    onnx.save_model(tied(engine_graph), path, save_as_external_data=True, **options)
    files = tuple(describe_file(bundle.folder, entry.path) for entry in bundle.manifest.files)
    bundle = replace(bundle, manifest=replace(bundle.manifest, files=files))
    sizes = []
    for share in (False, True):
        (plan,) = build(bundle, rtx, ("sm86",), share_weights=share).engine.record.plans
        assert plan.scratch_bytes is not None
        sizes.append(plan.scratch_bytes)
    assert sizes[1] <= sizes[0]


def inputs_of(path: Path) -> dict[str, Any]:
    rng, feeds = np.random.default_rng(0), {}
    for value in onnx.load(path, load_external_data=False).graph.input:
        tensor = value.type.tensor_type
        dims = [d.dim_value or {"capacity": 8}.get(d.dim_param, 2) for d in tensor.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        values = rng.integers(0, 5, dims) if kind != np.float16 else rng.standard_normal(dims)
        feeds[value.name] = values.astype(kind)
    return feeds


def logits(model: onnx.ModelProto, feeds: dict[str, Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(["logits"], feeds)


def test_graphs_that_mean_different_weights_by_a_name_are_refused(engine_bundle: Bundle) -> None:
    data = engine_bundle.graph_path("decode").read_bytes()
    model = onnx.load_from_string(data)
    first = next(t for t in model.graph.initializer if t.data_location and len(t.dims) > 1)
    next(e for e in first.external_data if e.key == "offset").value = "123"
    with pytest.raises(WireError, match="different weights"):
        shared_weights([data, model.SerializeToString()])


def test_types_that_no_plan_takes_are_refused(engine_bundle: Bundle) -> None:
    tensor = onnx.TensorProto(name="w", dims=[2, 2], data_type=onnx.TensorProto.DOUBLE)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    graph = onnx.GraphProto(initializer=[tensor])
    with pytest.raises(UsageError, match="elements of ONNX type 11"):
        shared_weights([onnx.ModelProto(graph=graph).SerializeToString()])


@pytest.mark.parametrize("change", [{"shape": (64, 128)}, {"dtype": "int8"}])
def test_a_network_with_another_weight_is_refused(change: dict[str, Any]) -> None:
    class Tensor:
        def __init__(self, name: str) -> None:
            self.name, self.shape = name, (128, 64)
            self.dtype = type("Half", (), {"name": "HALF"})

    class Network:
        num_inputs, num_outputs, num_layers = 1, 0, 0

        def get_input(self, index: int) -> Tensor:
            return Tensor("w")

    weight = SharedWeight("w", "float16", (128, 64), 0, 128 * 64 * 2)
    graph: Any = type("Graph", (), {"inputs": (), "outputs": (), "file": "decode.onnx"})
    network: Any = Network()
    with pytest.raises(BuildError, match="'w' is HALF"):
        check_network(network, graph, 64, [replace(weight, **change)])
