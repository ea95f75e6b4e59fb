"""What bench says beside what it measures: worked out for the engine that runs, or not at all."""

import dataclasses
from pathlib import Path

import pytest

from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.native_table import Rounding
from trtllm_lite.runtime.planning.cpu import NATIVE, NATIVE_EXACT, ORT_FLOAT, Cpu, Kernels
from trtllm_lite.runtime.planning.gpus import find_gpu
from trtllm_lite.runtime.planning.together import Prediction, predict
from trtllm_lite.runtime.planning.workload import Workload
from trtllm_lite.tools import bench_prediction
from trtllm_lite.tools.bench_prediction import gpu_predictions, known_gpu, predictions
from trtllm_lite.tools.bench_report import Limit, report, result_table
from trtllm_lite.tools.bench_run import BenchOptions, Point, Sample
from trtllm_lite.tools.doctor_checks.gpu_facts import Gpu, GpuFacts
from trtllm_lite.tools.plan_bundle import bundle_workloads

POINTS = [Point(8, 4, 1), Point(8, 4, 3)]
MEMORY, PRODUCTS = 1e9, 1e12


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_prediction, "typical_bandwidth", lambda *a: MEMORY)
    monkeypatch.setattr(bench_prediction, "product_rate", lambda *a: PRODUCTS)


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle, check_hashes=False)


def test_each_point_has_its_own(bundle: Bundle) -> None:
    found = predictions(bundle, POINTS, 2, 2**34, "auto", "fast", "auto")
    workload, _ = bundle_workloads(bundle)
    cpu = Cpu(MEMORY, PRODUCTS, ORT_FLOAT)
    assert found == {p: predict(workload, cpu, p.concurrency, 8, 4) for p in POINTS}


@pytest.mark.parametrize(
    ("kernels", "rounding", "kv_dtype", "used", "expected"),
    [
        ("auto", "fast", "auto", NATIVE, "float16"),
        ("auto", "exact", "auto", NATIVE_EXACT, "float16"),
        ("auto", "fast", "float32", NATIVE, "float32"),
        ("onnxruntime", "fast", "auto", ORT_FLOAT, "float32"),
        # The engine says that it has no such rounding.
        ("onnxruntime", "exact", "auto", ORT_FLOAT, "float32"),
    ],
)
def test_the_kernels_and_the_cache_are_those_asked_for(
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    rounding: Rounding,
    kv_dtype: str,
    used: Kernels,
    expected: str,
) -> None:
    plain, _ = bundle_workloads(bundle)
    native = dataclasses.replace(plain, step_bytes=7, kv_dtype="float16")
    asked: list[tuple[Workload, Cpu]] = []

    def predicted(workload: Workload, cpu: Cpu, *sizes: int) -> Prediction:
        asked.append((workload, cpu))
        return predict(workload, cpu, *sizes)

    def chosen(has_native: bool, quantize: str, rounding: Rounding) -> Kernels:
        if not has_native:
            assert rounding == "fast"
            return ORT_FLOAT
        return NATIVE_EXACT if rounding == "exact" else NATIVE

    monkeypatch.setattr(bench_prediction, "bundle_workloads", lambda _: (plain, native))
    monkeypatch.setattr(bench_prediction, "kernels_for", chosen)
    monkeypatch.setattr(bench_prediction, "predict", predicted)
    predictions(bundle, POINTS[:1], 2, 2**34, kernels, rounding, kv_dtype)
    ((workload, cpu),) = asked
    assert (workload.step_bytes == 7) is (used is not ORT_FLOAT)
    assert cpu.kernels is used
    assert workload.kv_dtype == expected


def test_nothing_is_said_where_nothing_is_known(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = dataclasses.replace(bundle.manifest, target="cuda")
    other = dataclasses.replace(bundle, manifest=on_gpu)
    assert predictions(other, POINTS, 2, 2**34, "auto", "fast", "auto") == {}
    monkeypatch.setattr(bench_prediction, "typical_bandwidth", lambda *a: None)
    assert predictions(bundle, POINTS, 2, 2**20, "auto", "fast", "auto") == {}


def test_a_gpu_s_are_its_limits(bundle: Bundle) -> None:
    gpu = find_gpu("l4")
    found = gpu_predictions(bundle, POINTS, gpu)
    workload, _ = bundle_workloads(bundle)
    read = workload.step_bytes + workload.kv_read_bytes(8 + 4 // 2)
    assert found[POINTS[0]].tpot == pytest.approx(read / gpu.bandwidth)
    assert found[POINTS[0]].bound == "memory"
    assert found.keys() == set(POINTS)
    other = dataclasses.replace(bundle.manifest, dtype="bfloat16")
    halves = dataclasses.replace(bundle, manifest=other)
    assert gpu_predictions(halves, POINTS, find_gpu("t4")) == {}


def test_only_gpus_of_the_table_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[GpuFacts] = []
    facts = "trtllm_lite.tools.doctor_checks.gpu_facts.read_gpus"
    monkeypatch.setattr(facts, lambda: said[-1])
    card = Gpu(0, "NVIDIA L4", "sm89", 22 * 2**30, 0)
    for gpus, name in (((card,), "l4"), ((dataclasses.replace(card, name="x"),), None), ((), None)):
        said.append(GpuFacts(gpus))
        found = known_gpu()
        assert (None if found is None else found.name) == name


def test_what_is_planned_stands_beside_what_is_measured(bundle: Bundle) -> None:
    samples = {point: [Sample((1.0,), (0.1,), 2.0, 4)] for point in POINTS}
    planned = {POINTS[1]: Prediction(0.9, 0.125, 30.0, "memory")}
    options = BenchOptions((8,), (4,), (1, 3))
    limit = Limit(4_000, 100_000.0)
    document = report(bundle, options, {"threads": 2}, limit, samples, planned)
    found = [result["predicted"] for result in document["results"]]
    seconds = {"ttft": 0.9, "tpot": 0.125, "tokens_per_second": 30.0, "bound": "memory"}
    assert found == [None, seconds]
    rows = result_table(document).rows
    assert [row[6:8] for row in rows] == [("-", "-"), ("900.0", "125.00")]
