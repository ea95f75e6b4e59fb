"""Making what the checks run: a random checkpoint, its bundle, and TensorRT plans."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.engines.engine_builder import PlanBuilder, build_engines
from trtllm_lite.runtime.engines.engine_key import BuildOptions
from trtllm_lite.runtime.engines.gpus import Gpu, current_gpu
from trtllm_lite.runtime.engines.plan_builder import build_plan
from trtllm_lite.runtime.engines.profiles import engine_limits
from trtllm_lite.runtime.engines.record import ENGINES_FOLDER
from trtllm_lite.runtime.engines.trt_module import TensorRT, require_tensorrt
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.tools.doctor_checks.jobs import Job
from trtllm_lite.tools.doctor_checks.result import CheckFailedError, CheckSkippedError, Numbers
from trtllm_lite.tools.doctor_checks.speed_checks import BUDGET

SEED = 0


def export_bundle(job: Job) -> Numbers:
    """The bundle of a job, and the checkpoint unless a job before has made it."""
    from trtllm_lite.exporter.options import ExportOptions
    from trtllm_lite.exporter.pipeline import export

    _make_checkpoint(job)
    options = ExportOptions(
        model=str(job.checkpoint),
        output=job.bundle,
        target=job.target,
        dtype=job.dtype,
        max_model_len=job.model.max_model_len,
        max_num_seqs=job.model.num_slots,
        verify=False,
        scout=False,
        overwrite=True,
    )
    report = export(options, NoProgress())
    return {"weight_bytes": float(report.weight_bytes)}


def _make_checkpoint(job: Job) -> None:
    from trtllm_lite.tools.make_checkpoint import SHAPES, make_checkpoint

    if not (job.checkpoint / "model.safetensors").exists():
        shape = SHAPES[job.model.shape]
        make_checkpoint(job.checkpoint, shape, sparse=False, seed=SEED, std=job.model.std)


@dataclass(frozen=True)
class PlanTools:
    """Where the GPU, TensorRT and plans come from."""

    gpu: Callable[[], Gpu | None] = current_gpu
    tensorrt: Callable[[tuple[str, ...], str | None], TensorRT] = require_tensorrt
    build: PlanBuilder = build_plan


def build_plans(job: Job, tools: PlanTools | None = None) -> Numbers:
    """The plans of a bundle for GPU 0, and what of their attention was put right."""
    needs_bundle(job)
    tools = tools or PlanTools()
    gpu = tools.gpu()
    if gpu is None:
        raise CheckFailedError("the CUDA driver shows this process no GPU")
    # Whoever opens the bundle then finds the plans of this job and no others.
    shutil.rmtree(job.bundle / ENGINES_FOLDER, ignore_errors=True)
    bundle = open_bundle(job.bundle, check_hashes=False)
    trt = tools.tensorrt((gpu.name,), gpu.name)
    limits = engine_limits(bundle.manifest.limits, None, None, BUDGET)
    driver = None if trt.nameable_gpus else gpu.driver
    options = BuildOptions(
        (gpu.name,),
        limits,
        driver,
        share_weights=job.form == "shared weights",
        single_engine=job.form == "single engine",
    )
    record = build_engines(bundle, options, trt, NoProgress(), tools.build).engine.record
    numbers = Numbers()
    for plan in record.plans:
        numbers[f"{plan.phase}_plan_bytes"] = float(plan.file.size)
        numbers[f"{plan.phase}_attention_layers"] = float(plan.attention_layers)
        numbers[f"{plan.phase}_lengths_set"] = float(plan.lengths_set)
    return numbers


def needs_bundle(job: Job) -> None:
    """Raises CheckSkippedError where an earlier step made none."""
    if not job.bundle.is_dir():
        raise CheckSkippedError("there is no bundle: see export")
