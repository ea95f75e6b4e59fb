"""The checks on a real bundle, with ONNX Runtime against transformers; and a real worker."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtllm_lite.exporter import pipeline
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.runtime.backends.base import Array, Batch, Session, SessionInfo
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.engines.engine_key import BuildOptions
from trtllm_lite.runtime.engines.gpus import Gpu
from trtllm_lite.runtime.engines.profiles import EngineLimits
from trtllm_lite.tools.doctor_checks import prepare
from trtllm_lite.tools.doctor_checks.bench import LIMITS, SENSITIVITY, Check, distance
from trtllm_lite.tools.doctor_checks.jobs import CORRECTNESS, SMOLLM2, TINY, Job, ModelPlan
from trtllm_lite.tools.doctor_checks.logits_checks import OneRow, PiecesOverCache
from trtllm_lite.tools.doctor_checks.prepare import SEED, PlanTools, build_plans, export_bundle
from trtllm_lite.tools.doctor_checks.reference import EagerReference
from trtllm_lite.tools.doctor_checks.result import CheckFailedError, judged
from trtllm_lite.tools.doctor_checks.runner import Runner
from trtllm_lite.tools.doctor_checks.sessions import JobBench
from trtllm_lite.tools.doctor_checks.speed_checks import BUDGET
from trtllm_lite.tools.doctor_checks.steps import steps_of
from trtllm_lite.tools.doctor_checks.workshop import Workshop
from trtllm_lite.tools.make_checkpoint import SHAPES, make_checkpoint


@dataclass(frozen=True)
class KeptJob(Job):
    """A job on a checkpoint and a bundle that are there already."""

    kept: tuple[Path, Path] = (Path(), Path())

    @property
    def checkpoint(self) -> Path:
        return self.kept[0]

    @property
    def bundle(self) -> Path:
        return self.kept[1]


@pytest.fixture(scope="module")
def job(tiny_checkpoint: Path, tiny_bundle: Path) -> Job:
    return KeptJob("cpu", "float32", TINY, "", kept=(tiny_checkpoint, tiny_bundle))


@pytest.fixture
def bench(job: Job) -> Iterator[JobBench]:
    bench = JobBench(job, Workshop())
    yield bench
    bench.close()


def test_facts(bench: JobBench, tiny_bundle: Path) -> None:
    manifest, facts = open_bundle(tiny_bundle).manifest, bench.facts
    assert facts.weight_bytes >= 4 * manifest.model.num_parameters
    assert facts.kv_bytes == manifest.kv.bytes_per_token
    assert (facts.vocab_size, facts.num_slots) == (manifest.model.vocab_size, TINY.num_slots)


@pytest.mark.parametrize("model", [TINY, SMOLLM2], ids=lambda m: m.shape)
@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
def test_what_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: ModelPlan, target: str
) -> None:
    """The checkpoint is made once, the options are those of the job."""
    made: list[ExportOptions] = []

    def export(options: ExportOptions, progress: object) -> SimpleNamespace:
        made.append(options)
        return SimpleNamespace(weight_bytes=7)

    monkeypatch.setattr(pipeline, "export", export)
    monkeypatch.setitem(SHAPES, "135m", SHAPES["tiny"])
    job = Job(target, "float16", model, str(tmp_path))
    assert export_bundle(job) == {"weight_bytes": 7.0}
    written = (job.checkpoint / "model.safetensors").stat().st_mtime_ns
    assert export_bundle(replace(job, target="cpu", dtype="float32")) == {"weight_bytes": 7.0}
    assert (job.checkpoint / "model.safetensors").stat().st_mtime_ns == written
    options = made[0]
    assert (options.target, options.dtype, options.output) == (target, "float16", job.bundle)
    assert (options.max_model_len, options.max_num_seqs) == (model.max_model_len, model.num_slots)
    assert not options.verify


@pytest.mark.parametrize("nameable", [(), ("sm89",)], ids=["tensorrt", "rtx"])
def test_what_is_built(
    job: Job, monkeypatch: pytest.MonkeyPatch, nameable: tuple[str, ...]
) -> None:
    """Plans for this GPU whose slots are those of the session; a driver only where it measures."""
    made: list[BuildOptions] = []
    plan = SimpleNamespace(
        phase="decode", file=SimpleNamespace(size=9), attention_layers=2, lengths_set=2
    )

    def build(bundle: object, options: BuildOptions, *_: object) -> SimpleNamespace:
        made.append(options)
        return SimpleNamespace(engine=SimpleNamespace(record=SimpleNamespace(plans=[plan])))

    trt = SimpleNamespace(nameable_gpus=nameable)
    monkeypatch.setattr(prepare, "build_engines", build)

    def found(gpus: tuple[str, ...], here: str | None) -> Any:
        return trt

    numbers = build_plans(job, PlanTools(lambda: Gpu("sm89", "580.1"), found))
    assert numbers == {
        "decode_plan_bytes": 9.0,
        "decode_attention_layers": 2.0,
        "decode_lengths_set": 2.0,
    }
    (options,) = made
    assert options.gpus == ("sm89",)
    assert options.driver == (None if nameable else "580.1")
    assert options.limits.capacity == TINY.capacity
    with pytest.raises(CheckFailedError, match="no GPU"):
        build_plans(job, PlanTools(lambda: None, found))


@pytest.mark.parametrize("model", [TINY, SMOLLM2], ids=lambda m: m.shape)
def test_slots_of_plans_are_those_of_sessions(model: ModelPlan) -> None:
    limits = EngineLimits(model.num_slots, model.max_model_len, BUDGET)
    assert limits.capacity == model.capacity


def test_every_check(bench: JobBench) -> None:
    for check in CORRECTNESS:
        result = judged(check.name, "cpu", lambda check=check: check.run(bench))  # type: ignore[misc]  # a lambda with a default has no inferred type
        assert (result.status, result.reason) == ("passed", ""), check.name
        distances = [v for n, v in result.numbers.items() if n.endswith("distance")]
        assert max(distances, default=0.0) < 1e-5


def test_the_small_model_is_sensitive_enough_for_every_type(tmp_path: Path) -> None:
    """Another first token moves the last logits by far more than roundings of bfloat16."""
    make_checkpoint(tmp_path, SHAPES[TINY.shape], sparse=False, seed=SEED, std=TINY.std)
    reference, row = EagerReference(tmp_path, "bfloat16"), [1, *range(20, 40)]
    wanted, moved = reference.logits(row), reference.logits([2, *row[1:]])
    assert distance(moved[-1:], wanted[-1:]) > SENSITIVITY * LIMITS["bfloat16"]


class Shifted:
    """A session whose pieces over the cache begin one token too early."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def info(self) -> SessionInfo:
        return self._session.info

    def run(self, batch: Batch) -> Array:
        if batch.past_lens.any() and batch.phase == "prefill":
            batch = replace(batch, past_lens=batch.past_lens - np.int32(1))
        return self._session.run(batch)


def test_a_slip_of_a_real_model_is_far_beyond_the_limit(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifted = Shifted(bench.subject)
    monkeypatch.setattr(JobBench, "subject", shifted)
    result = judged("x", "y", lambda: PiecesOverCache().run(bench))
    assert result.status == "failed"
    assert result.numbers["first_token_distance"] > 0.1


def test_a_session_that_does_not_open_fails_once(job: Job) -> None:
    def broken(*_: object) -> Session:
        raise RuntimeError("CUDA error 803")

    bench = JobBench(job, Workshop(open=broken))
    checks: list[Check] = [OneRow(), PiecesOverCache()]
    first, second = (judged(c.name, "x", lambda c=c: c.run(bench)) for c in checks)  # type: ignore[misc]  # a lambda with a default has no inferred type
    assert (first.status, first.reason) == ("failed", "RuntimeError: CUDA error 803")
    assert (second.status, second.reason) == (
        "skipped",
        "the session did not open: see the first check",
    )


def test_a_real_worker_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes reaches the runner, whatever libraries print."""
    from trtllm_lite.tools.doctor_checks import runner

    job = Job("cuda", "float16", TINY, str(tmp_path))
    steps = tuple(s for s in steps_of(job) if s.name == OneRow.name)
    monkeypatch.setattr(runner, "steps_of", lambda _: steps)
    (result,) = Runner(tmp_path, 60.0).run(job, lambda _: None)
    assert (result.status, result.reason) == ("skipped", "there is no bundle: see export")
