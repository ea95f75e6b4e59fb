"""`doctor --gpu` as a whole, on stand-ins that take the place of the GPU: processes, order, times,
the record and the exit code. Run as a program, this file is the process that computes."""

import json
import pickle
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from trtllm_lite.runtime.backends.base import Array, Batch, KVBlock, Session, SessionOptions
from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.fake_tensorrt import FakeTensorRT, fake_plan
from trtllm_lite.runtime.backends.ort_cuda import open_on_host
from trtllm_lite.runtime.backends.tensorrt import Machinery
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.engines.attention_patch import BuildError, Patched
from trtllm_lite.runtime.engines.gpus import Gpu as DriverGpu
from trtllm_lite.runtime.engines.plan_builder import BuiltPlan, PlanRequest
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.tools.console import Console, Settings
from trtllm_lite.tools.doctor_checks import drive
from trtllm_lite.tools.doctor_checks.bench import ReferenceModel
from trtllm_lite.tools.doctor_checks.choices import Machine, choices
from trtllm_lite.tools.doctor_checks.drive import Logits
from trtllm_lite.tools.doctor_checks.gpu_facts import Gpu, GpuFacts
from trtllm_lite.tools.doctor_checks.host_facts import read_host
from trtllm_lite.tools.doctor_checks.jobs import (
    SMOLLM2,
    TINY,
    Job,
    PlanForm,
    Times,
    read_job,
    write_job,
)
from trtllm_lite.tools.doctor_checks.logits_checks import OneRow
from trtllm_lite.tools.doctor_checks.machine import Report
from trtllm_lite.tools.doctor_checks.openers import open_plans
from trtllm_lite.tools.doctor_checks.packages import OnnxRuntime
from trtllm_lite.tools.doctor_checks.prepare import PlanTools, build_plans, export_bundle
from trtllm_lite.tools.doctor_checks.proof import ProofPlan, prove_gpu
from trtllm_lite.tools.doctor_checks.result import Numbers
from trtllm_lite.tools.doctor_checks.speed_checks import PROMPT
from trtllm_lite.tools.doctor_checks.steps import steps_of
from trtllm_lite.tools.doctor_checks.tensorrt_facts import FoundTensorRt
from trtllm_lite.tools.doctor_checks.tensorrt_facts import TensorRt as TensorRtFacts
from trtllm_lite.tools.doctor_checks.worker import main
from trtllm_lite.tools.doctor_checks.workshop import Workshop, eager_reference

VERSION = "11.4.0.106"
SOON = Times(0.0, 900.0)
EVERYTHING = replace(TINY, checks="all", max_model_len=256, num_slots=32, export=SOON, build=SOON)
MANY = "throughput at 128"
"""The check that this number of slots leaves out, for the time that it takes."""
FIRST = "tensorrt"
DRIVER_GPU = DriverGpu("sm89", "580.1")


# The stand-ins


def build_fake(job: Job) -> Numbers:
    """Plans for the stand-in of TensorRT, by the same way as real ones."""
    manifest = open_bundle(job.bundle, check_hashes=False).manifest

    def build(trt: TensorRT, request: PlanRequest, progress: Progress) -> BuiltPlan:
        graph, profile = request.graph, request.profiles[0]
        data = fake_plan(
            manifest,
            request.path,
            graph.phase,
            profile,
            request.capacity,
            more=request.profiles[1:],
            weights=request.weights,
        )
        patched = Patched(2, 2, 0)
        return BuiltPlan(memoryview(data), patched, False, None, None, None)

    def found(gpus: tuple[str, ...], here: str | None) -> TensorRT:
        return fake_tensorrt(FakeDevice())

    return build_plans(job, PlanTools(lambda: DRIVER_GPU, found, build))


def fake_tensorrt(device: FakeDevice) -> TensorRT:
    return TensorRT(FakeTensorRT(onnxruntime, device), "tensorrt", VERSION)


def open_fake(bundle: Bundle, options: SessionOptions) -> Session:
    """ONNX Runtime's CPU provider behind TensorRT's names, or as the CUDA provider."""
    if bundle.manifest.target == "cuda":
        return open_on_host(bundle, options)
    device = FakeDevice(2**31)
    machinery = Machinery(lambda: (fake_tensorrt(device),), lambda: device)
    return open_plans(bundle, options, machinery)


class Broken:
    """A session with a slip for every check."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.info = session.info
        self.interrupt, self.release = session.interrupt, session.release
        self.read, self.write, self.move = session.read, session.write, session.move
        self.close = session.close

    def run(self, batch: Batch) -> Array:
        if batch.token_ids.shape[1] == PROMPT:
            raise RuntimeError("an illegal memory access")
        logits = self._session.run(batch)
        if batch.phase == "decode" and batch.first_slot == 0:
            (block,) = self._session.read(0, [(0, 1)])
            self._session.write(0, 0, [KVBlock(block.values, block.keys)])
        logits[-1, :, 0] += np.abs(logits).max() * (1 if batch.first_slot == 0 else 2)
        return logits

    def swap(self, a: int, b: int, length: int) -> None:
        """Forgotten."""


class Twin:
    """The same graphs in a session of their own, one row at a time, as the reference."""

    def __init__(self, job: Job) -> None:
        options = SessionOptions(1, job.model.capacity)
        self._session = open_fake(open_bundle(job.bundle, check_hashes=False), options)

    def logits(self, row: Sequence[int]) -> Logits:
        return drive.prompt(self._session, [row], every=True)[0]

    def keys_values(self, row: Sequence[int]) -> KVBlock:
        drive.prompt(self._session, [row])
        return self._session.read(0, [(0, len(row))])[0]


class Written:
    """What transformers' model says of a row, computed once: both targets are asked for the same
    rows of the same model, and only the process of the first has loaded torch."""

    def __init__(self, kept: Path, job: Job) -> None:
        self._kept, self._job = kept, job
        self._model: ReferenceModel | None = None

    def logits(self, row: Sequence[int]) -> Logits:
        said: Logits = self._said("logits", row)
        return said

    def keys_values(self, row: Sequence[int]) -> KVBlock:
        said: KVBlock = self._said("keys_values", row)
        return said

    def _said(self, question: str, row: Sequence[int]) -> Any:
        path = self._kept / f"{question}-{'-'.join(map(str, row))}.pickle"
        if not path.exists():
            if self._job.target != FIRST:
                raise AssertionError("the first target was not asked for this row")
            self._model = self._model or eager_reference(self._job)
            path.write_bytes(pickle.dumps(getattr(self._model, question)(row)))
        return pickle.loads(path.read_bytes())


def export_all(kept: Path) -> Callable[[Job], Numbers]:
    """The first target's process exports for both of them, and keeps the bundles."""

    def export(job: Job) -> Numbers:
        if job.target != FIRST:
            return copy_bundle(kept)(job)
        for target in ("cuda", FIRST):
            made = replace(job, target=target)
            numbers = export_bundle(made)
            shutil.copytree(made.bundle, kept / made.bundle.name)
            if target != FIRST:
                shutil.rmtree(made.bundle)
        return numbers

    return export


def copy_bundle(kept: Path) -> Callable[[Job], Numbers]:
    def copy(job: Job) -> Numbers:
        shutil.copytree(kept / job.bundle.name, job.bundle)
        return {}

    return copy


def no_plans(job: Job) -> Numbers:
    raise BuildError("Attention is not supported by a dedicated kernel")


def stand_in(mode: str, kept: Path) -> Workshop:
    shop = Workshop(copy_bundle(kept), build_fake, open_fake, Twin)
    return {
        "right": replace(shop, export=export_all(kept), reference=lambda job: Written(kept, job)),
        "broken": replace(shop, open=lambda bundle, options: Broken(open_fake(bundle, options))),
        "no plans": replace(shop, build=no_plans),
    }[mode]


def run_stand_in(mode: str, kept: str, file: str) -> None:
    """The program."""
    path = Path(file)
    if mode == "broken":
        # Memory so slow that no step can be as fast as it was.
        write_job(replace(read_job(path), bandwidth=1.0), path)
    main([file], stand_in(mode, Path(kept)))


# The tests


GPUS = GpuFacts((Gpu(0, "NVIDIA L4", "sm89", 24 * 2**30, 23 * 2**30),), "580.1", "13.0", "nvml")
ORT = OnnxRuntime("1.32.0", ("onnxruntime-gpu",), ("CUDAExecutionProvider",))
TRT = TensorRtFacts((FoundTensorRt("tensorrt", VERSION, ()),), "13.0")


@dataclass(frozen=True)
class Ended:
    code: int
    document: dict[str, Any]

    def results(self, lane: str) -> dict[str, tuple[str, str]]:
        """Status and reason by the check's name."""
        found = [r for r in self.document["results"] if r["lane"] == lane]
        return {r["name"]: (r["status"], r["reason"]) for r in found}


def prove(folder: Path, mode: str, kept: Path, *, ort: OnnxRuntime = ORT, **changes: Any) -> Ended:
    machine = Machine(read_host(), ort, TRT, GPUS)
    report = Report((), machine, choices(machine))
    worker = (sys.executable, __file__, mode, str(kept))
    plan = replace(ProofPlan(1800.0, worker, (EVERYTHING,)), **changes)
    code = prove_gpu(Console(Settings(quiet=True)), report, folder, json=True, plan=plan)
    return Ended(code, json.loads((folder / "doctor-gpu.json").read_text()))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory, kept: Path) -> Ended:
    return prove(tmp_path_factory.mktemp("right"), "right", kept)


def job_of(target: str, form: PlanForm = "usual", folder: str = "") -> Job:
    return Job(target, "float16", EVERYTHING, folder, form=form)


def names(job: Job) -> list[str]:
    return [step.name for step in steps_of(job)]


JOBS = [
    *(job_of("tensorrt"), job_of("cuda")),
    *(job_of("tensorrt", "shared weights"), job_of("tensorrt", "single engine")),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.lane)
def test_every_check_passes_on_what_computes_rightly(right: Ended, job: Job) -> None:
    found = right.results(job.lane)
    assert list(found) == names(job)
    many = found.pop(MANY, None)
    assert many in (None, ("skipped", "the session has 32 slots"))
    assert {name: said for name, said in found.items() if said != ("passed", "")} == {}
    assert right.code == 0
    distances = [
        value
        for result in right.document["results"]
        for name, value in result["numbers"].items()
        if name.endswith("distance")
    ]
    assert 0 < max(distances) < 0.01


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.lane)
def test_every_check_fails_on_what_does_not(broken: Ended, job: Job) -> None:
    found = broken.results(job.lane)
    assert list(found) == names(job)
    others = {"export", "build plans", MANY}
    assert {name for name, said in found.items() if said[0] != "failed"} <= others
    assert broken.code == 1


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, kept: Path, right: Ended) -> Ended:
    return prove(tmp_path_factory.mktemp("broken"), "broken", kept)


def test_plans_that_are_not_built_fail_once(tmp_path: Path, kept: Path, right: Ended) -> None:
    ended = prove(tmp_path, "no plans", kept, ort=OnnxRuntime(problem="it is not installed"))
    job = job_of("tensorrt")
    found = ended.results(job.lane)
    assert found["build plans"][0] == "failed"
    assert "dedicated kernel" in found["build plans"][1]
    first, *rest = names(job)[2:]
    assert found[first][0] == "failed"
    assert {found[name][0] for name in rest} == {"skipped"}
    assert ended.results("cuda")["all checks"][0] == "skipped"
    assert ended.code == 1


def test_real_plans_are_built(tmp_path: Path, kept: Path, right: Ended) -> None:
    """By TensorRT-RTX, for a GPU that need not be there."""
    pytest.importorskip("tensorrt_rtx")
    job = job_of("tensorrt", folder=str(tmp_path))
    copy_bundle(kept)(job)
    numbers = build_plans(job, PlanTools(lambda: DRIVER_GPU))
    for phase, lengths in {"prefill": 0, "decode": 2, "extend": 2}.items():
        assert numbers[f"{phase}_plan_bytes"] > 10_000
        assert numbers[f"{phase}_attention_layers"] == 2
        assert numbers[f"{phase}_lengths_set"] == lengths


def test_what_there_is_no_time_for_is_left_out(tmp_path: Path, kept: Path) -> None:
    ended = prove(tmp_path, "right", kept, models=(TINY, SMOLLM2), limit_s=20.0)
    lanes = {(r["lane"], r["status"]) for r in ended.document["results"]}
    models, targets = (TINY.name, SMOLLM2.name), ("tensorrt", "cuda")
    usual = {f"{target}, {model}" for target in targets for model in models}
    forms = {f"tensorrt, {TINY.name}, {form}" for form in ("shared weights", "single engine")}
    assert lanes == {(lane, "skipped") for lane in usual | forms}
    needed = TINY.export.expected + TINY.build.expected + OneRow.expected_s
    reason = ended.results("tensorrt, tiny")["export"][1]
    assert reason == f"left out: 20 s of 20 are left, and what comes next takes about {needed:.0f}"
    assert ended.code == 1


if __name__ == "__main__":
    run_stand_in(*sys.argv[1:])
