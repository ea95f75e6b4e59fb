"""Weights once on the device: plans that read them as inputs, and one plan for all phases. Built by
the builder with a fake TensorRT, run by the backend; every logit is the model's."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from trtllm_lite.runtime.backends import tensorrt
from trtllm_lite.runtime.backends.fake_tensorrt import fake_plan
from trtllm_lite.runtime.backends.shared_weights import check_weights, upload_weights
from trtllm_lite.runtime.backends.tensorrt import find_plans
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.bundle_files import describe_file
from trtllm_lite.runtime.engines.attention_patch import Patched
from trtllm_lite.runtime.engines.engine_builder import BuildReport, build_engines
from trtllm_lite.runtime.engines.engine_key import BuildOptions, engine_key
from trtllm_lite.runtime.engines.plan_builder import BuiltPlan, PlanRequest
from trtllm_lite.runtime.engines.profiles import EngineLimits
from trtllm_lite.runtime.engines.record import RECORD_NAME, SharedWeight, render_record
from trtllm_lite.runtime.engines.store import Need
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.errors import BundleError, StepError, UsageError
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.manifest import FileEntry
from trtllm_lite.runtime.manifest_io import write_manifest
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.runtime.sampling_params import SamplingParams

LIMITS = EngineLimits(4, 40, 16)
SHARED: dict[str, Any] = {"share_weights": True}
SINGLE: dict[str, Any] = {"single_engine": True}
VERSION = "10.16.1.11"
WAYS = pytest.mark.parametrize("way", [SHARED, SINGLE, {}], ids=["shared", "single", "copies"])

Make = Callable[..., Any]


def outside(bundle: Bundle) -> Bundle:
    """The same bundle with the matrices of its graphs in its file of weights."""
    folder = bundle.folder
    for graph in bundle.manifest:
        model = onnx.load(folder / graph.file)
        (folder / "weights.bin").unlink()
        options = {"location": "weights.bin", "size_threshold": 1024, "convert_attribute": False}
        onnx.save_model(model, folder / graph.file, save_as_external_data=True, **options)
    files = tuple(describe_file(folder, entry.path) for entry in bundle.manifest.files)
    write_manifest(folder, replace(bundle.manifest, files=files))
    return open_bundle(folder)


def fake_builder(bundle: Bundle) -> Callable[..., BuiltPlan]:
    def build(trt: TensorRT, request: PlanRequest, progress: Any) -> BuiltPlan:
        first, *more = request.profiles
        phase, capacity = request.graph.phase, request.capacity
        data = fake_plan(
            bundle.manifest,
            request.path,
            phase,
            first,
            capacity,
            more=more,
            weights=request.weights,
        )
        return BuiltPlan(memoryview(data), Patched(2, 2, 0), False, None, None, None)

    return build


def built(rig: Any, **way: Any) -> tuple[Any, BuildReport]:
    """The rig with plans that the builder made, and what the builder says."""
    bundle = outside(rig.bundle)
    options = BuildOptions(("sm89",), LIMITS, **way)
    trt = TensorRT(rig.trt, "tensorrt", VERSION)
    report = build_engines(bundle, options, trt, NoProgress(), fake_builder(bundle))
    return replace(rig, bundle=bundle), report


def matrix_bytes(rig: Any) -> int:
    return sum(w.nbytes for w in rig.model.weights.values() if w.nbytes >= 1024)


@WAYS
def test_every_logit_is_the_models(rig: Any, way: dict[str, Any]) -> None:
    made, _ = built(rig, **way)
    driver, rng = made.driver(), random.Random(3)

    def some(rows: int, most: int) -> list[list[int]]:
        return [[rng.randrange(28) for _ in range(rng.randint(1, most))] for _ in range(rows)]

    driver.run("prefill", 0, some(4, 9))
    for _ in range(3):
        driver.run("decode", 0, [row[:1] for row in some(4, 1)])
    driver.run("prefill", 1, some(2, 8), every=True)
    driver.run("decode", 0, some(3, 4), every=True)
    driver.run("decode", 2, some(1, 1))
    driver.session.close()
    assert rig.device.addresses == ()


@WAYS
def test_greedy_tokens_are_those_of_plans_with_their_own_weights(
    rig: Any, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = built(rig, **way)
    monkeypatch.setattr(tensorrt, "Machinery", lambda: made.machinery)
    rng = random.Random(1)
    asked = [[rng.randrange(28) for _ in range(rng.randint(1, 24))] for _ in range(7)]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    with LLM(made.bundle.folder, max_num_batched_tokens=16) as llm:
        outputs = llm.generate(prompt_token_ids=asked, params=params)
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [rig.model.greedy(prompt, 9) for prompt in asked]


def test_shared_weights_lie_on_the_device_once(make: Make) -> None:
    """Behind them the device has no room for a second copy."""
    rig, report = built(make(), **SHARED)
    before = rig.device.memory()[0]
    session = rig.session(num_slots=1)
    taken = before - rig.device.memory()[0]
    every, pool = matrix_bytes(rig), session.pool.nbytes
    assert every <= taken - pool < every + 2**19
    assert {len(e.fixed) for e in rig.trt.engines} == {len(report.engine.record.weights)}
    names = {w.name for w in report.engine.record.weights}
    assert all(e.fixed.keys() == names for e in rig.trt.engines)
    session.close()


def test_the_ledger_counts_shared_weights_once(rig: Any) -> None:
    made, report = built(rig, **SHARED)
    assert report.ledger.shared_weights == matrix_bytes(made)
    assert [p.file_weights for p in report.ledger.phases] == [0, 0, 0]
    assert report.ledger.weights == matrix_bytes(made)
    _, copies = built(rig)
    assert copies.ledger.weights == 3 * matrix_bytes(made)


def test_a_single_engine_is_loaded_once_and_has_a_profile_for_steps(rig: Any) -> None:
    made, report = built(rig, **SINGLE)
    assert [p.phase for p in report.ledger.phases] == ["extend"]
    assert report.ledger.weights == matrix_bytes(made)
    session = made.session()
    (engine,) = made.trt.engines
    assert engine.num_optimization_profiles == 2
    session.run(made.batch("prefill", 0, [(0, [1, 2, 3]), (0, [4])]))
    session.run(made.batch("decode", 0, [(3, [5]), (1, [6])]))
    assert [shapes["input_ids"] for shapes in engine.executions] == [(2, 3), (2, 1)]
    limits = session._limits
    assert set(limits) == {"decode", "extend"}
    assert (limits["decode"].seq.most, limits["extend"].seq.most) == (1, 17)
    session.close()


def test_recorded_steps_of_a_single_engine_keep_their_profile(rig: Any) -> None:
    made, _ = built(rig, **SINGLE)
    driver = made.driver()
    driver.run("prefill", 0, [[1, 2, 3]])
    for token in range(4):
        driver.run("decode", 0, [[token]])
    assert sum(run.launches for run in rig.device.recorded) >= 2
    driver.session.close()


def test_the_plans_that_were_built_last_are_taken(rig: Any) -> None:
    bundle = outside(rig.bundle)
    trt = TensorRT(rig.trt, "tensorrt", VERSION)
    for way in (SHARED, {}, SINGLE):
        options = BuildOptions(("sm89",), LIMITS, **way)
        report = build_engines(bundle, options, trt, NoProgress(), fake_builder(bundle))
        found = find_plans(bundle, Need(1, 1), rig.machinery)
        assert found.stored.folder == report.engine.folder
        found.close()


def test_both_ways_at_once_are_refused(rig: Any) -> None:
    options = BuildOptions(("sm89",), LIMITS, share_weights=True, single_engine=True)
    with pytest.raises(UsageError, match="one plan has its weights once anyway"):
        engine_key(rig.bundle, options, TensorRT(rig.trt, "tensorrt", VERSION))


def test_without_an_extend_graph_there_is_no_single_engine(rig: Any) -> None:
    manifest = rig.bundle.manifest
    fewer = replace(manifest, graphs=tuple(g for g in manifest if g.phase != "extend"))
    options = BuildOptions(("sm89",), LIMITS, single_engine=True)
    trt = TensorRT(rig.trt, "tensorrt", VERSION)
    with pytest.raises(UsageError, match="no extend graph"):
        engine_key(replace(rig.bundle, manifest=fewer), options, trt)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": 4}, "has 4 bytes, not those of its shape"),
        ({"offset": 10**9}, "is not inside weights.bin"),
        ({"offset": -4}, "is not inside weights.bin"),
        ({"dtype": "float64"}, "cannot be shared"),
        ({"shape": (0, 8)}, "cannot be shared"),
        ({"name": "b"}, "two have one name"),
    ],
)
def test_a_record_that_says_something_else_is_refused(change: dict[str, Any], said: str) -> None:
    weights = [SharedWeight(n, "float32", (8, 8), 256 * i, 256) for i, n in enumerate("ab")]
    entry = FileEntry("weights.bin", 512, "0" * 64)
    check_weights(weights, entry)
    with pytest.raises(BundleError, match=said):
        check_weights([replace(weights[0], **change), weights[1]], entry)


def test_a_weight_of_another_shape_than_the_plan_has_is_refused(rig: Any) -> None:
    made, report = built(rig, **SHARED)
    record = report.engine.record
    (head,) = (w for w in record.weights if w.name == "head")
    turned = replace(head, shape=head.shape[::-1])
    weights = tuple(turned if w is head else w for w in record.weights)
    path = report.engine.root / report.engine.folder / RECORD_NAME
    path.write_bytes(render_record(replace(record, weights=weights)))
    with pytest.raises(BundleError, match=r"'head' is float32 \[64, 29\] in the plan"):
        made.session()
    assert rig.device.addresses == ()


def test_matrices_go_to_aligned_places_piece_by_piece(
    tmp_path: Path, rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names of the same bytes have one place; offsets in the file need not be aligned."""
    monkeypatch.setattr("trtllm_lite.runtime.backends.shared_weights.PIECE_BYTES", 100)
    data = np.arange(1000, dtype=np.uint8).tobytes()
    (rig.bundle.folder / "weights.bin").write_bytes(data)
    files = tuple(
        describe_file(rig.bundle.folder, e.path) if e.path == "weights.bin" else e
        for e in rig.bundle.manifest.files
    )
    bundle = replace(rig.bundle, manifest=replace(rig.bundle.manifest, files=files))
    places = {"a": (3, 300), "b": (305, 40), "tied": (3, 300)}
    weights = [SharedWeight(n, "int8", (1, size), at, size) for n, (at, size) in places.items()]
    made = upload_weights(rig.device, bundle, weights)
    assert made.addresses["a"] == made.addresses["tied"] != made.addresses["b"]
    assert made.nbytes == 512 + 256
    for name, (at, size) in places.items():
        assert made.addresses[name] % 256 == 0
        kept = rig.device.bytes_at(made.addresses[name], size, on_device=True)
        assert kept.tobytes() == data[at : at + size]
    assert len(rig.device.addresses) == 1


def test_weights_that_do_not_fit_are_told_in_numbers(make: Make) -> None:
    rig, _ = built(make(device_bytes=2**15), **SHARED)
    with pytest.raises(UsageError, match=r"the weights take \d+ MiB, which fake does not have"):
        rig.session(num_slots=1)
    assert rig.device.addresses == ()


def test_a_file_that_became_shorter_is_told(rig: Any) -> None:
    made, _ = built(rig, **SHARED)
    path = made.bundle.folder / "weights.bin"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BundleError, match="is shorter than it was"):
        made.session()


def test_the_fake_needs_the_address_of_every_weight(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = built(rig, **SHARED)
    monkeypatch.setattr("trtllm_lite.runtime.backends.trt_plans._weights_of", lambda *args: [])
    session = made.session()
    with pytest.raises(StepError, match="has no address"):
        session.run(made.batch("prefill", 0, [(0, [1])]))
