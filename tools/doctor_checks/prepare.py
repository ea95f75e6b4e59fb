"""Making what the checks run: a random checkpoint, its bundle, and TensorRT plans."""

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


def build_plans(job: Job) -> Numbers:
    """The plans of a bundle for GPU 0, and what of their attention was put right."""
    from trtllm_lite.runtime.bundle import open_bundle
    from trtllm_lite.runtime.engines.engine_builder import BuildOptions, build_engines
    from trtllm_lite.runtime.engines.gpus import current_gpu
    from trtllm_lite.runtime.engines.profiles import engine_limits
    from trtllm_lite.runtime.engines.trt_module import require_tensorrt

    needs_bundle(job)
    gpu = current_gpu()
    if gpu is None:
        raise CheckFailedError("the CUDA driver shows this process no GPU")
    bundle = open_bundle(job.bundle, check_hashes=False)
    trt = require_tensorrt((gpu.name,), gpu.name)
    limits = engine_limits(bundle.manifest.limits, None, None, BUDGET)
    driver = None if trt.nameable_gpus else gpu.driver
    options = BuildOptions((gpu.name,), limits, driver)
    record = build_engines(bundle, options, trt, NoProgress()).engine.record
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
