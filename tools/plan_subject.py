"""What `plan` plans: a checkpoint's export, with fake weights, or a finished bundle."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.manifest import MANIFEST_NAME
from trtllm_lite.runtime.planning.workload import Workload
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.failures import needs_extra

if TYPE_CHECKING:
    from trtllm_lite.exporter.outline import Outline

CPU = "cpu"
FIXED_BY_A_BUNDLE = ("target", "quantize", "dtype", "kv_dtype", "revision")
EXPORT_BASE_BYTES = 2**30
"""Estimate: torch, transformers and a traced graph."""
BUILD_BASE_BYTES = 2**30
"""Estimate: TensorRT's builder without weights."""
BUILD_COPIES = 3
"""Estimate: the parsed weights of a plan, those it chose a layout for, and the plan. TensorRT-RTX
1.7.1 took 1.6 GiB for plans of 258 MiB."""


@dataclass(frozen=True)
class Wanted:
    """The options of `plan`; None is the default."""

    gpu: str | None = None
    threads: int | None = None
    target: str | None = None
    quantize: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    revision: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    input_len: int = 512
    output_len: int = 128


@dataclass(frozen=True)
class Subject:
    """What is planned. `workload`: over ONNX Runtime's or TensorRT's operators, `native`: over our
    own kernels, where there are graphs for them. resident_bytes: all copies of weights on a device.
    scratch_width: the widest layer, None where it is not known. host_bytes: memory of the host by
    what it is needed for."""

    name: str
    kind: str
    model_type: str
    num_parameters: int
    target: str
    dtype: str
    quantize: str
    max_model_len: int
    hidden_size: int
    workload: Workload
    native: Workload | None
    resident_bytes: int
    scratch_width: int | None
    query_width: int | None
    host_bytes: Mapping[str, int]
    notes: tuple[str, ...] = ()


def subject(model: str, wanted: Wanted, console: Console, progress: Progress) -> Subject:
    """Look at a bundle or go through an export. Raises UsageError for options that do not go with
    it, and what opening it raises."""
    if (Path(model) / MANIFEST_NAME).is_file():
        found = _of_bundle(Path(model), wanted, progress)
    else:
        found = _of_checkpoint(model, wanted, console, progress)
    longest = wanted.input_len + wanted.output_len
    if longest > found.max_model_len:
        raise UsageError(
            f"--input-len + --output-len: got {wanted.input_len} + {wanted.output_len} = {longest} "
            f"tokens; allowed: {found.max_model_len}; give fewer, or a longer --max-model-len"
        )
    return found


def _of_checkpoint(model: str, wanted: Wanted, console: Console, progress: Progress) -> Subject:
    from trtllm_lite.tools.export import libraries_quiet

    target = wanted.target or (CPU if wanted.gpu is None else "tensorrt")
    _check_target(target, wanted, f"--target {target}")
    with needs_extra("export"), libraries_quiet(console):
        from trtllm_lite.exporter.options import ExportOptions
        from trtllm_lite.exporter.outline import outline

        options = ExportOptions(
            model=model,
            output=Path(MANIFEST_NAME),
            target=target,
            dtype=wanted.dtype or "auto",
            quantize=wanted.quantize or "none",
            kv_dtype=wanted.kv_dtype or "float32",
            max_model_len=wanted.max_model_len,
            max_num_seqs=wanted.max_num_seqs,
            revision=wanted.revision,
            dry_run=True,
        )
        return _from_outline(model, outline(options, progress), wanted)


def _from_outline(model: str, found: "Outline", wanted: Wanted) -> Subject:
    weights = found.workload.weight_bytes
    resident = _resident(found.target, found.phase_bytes, weights)
    host = {
        "export": EXPORT_BASE_BYTES + 2 * found.largest_tensor_bytes,
        "verify": EXPORT_BASE_BYTES + 4 * found.num_parameters + weights,
    }
    spared = "weights that calibration keeps in 8 bits are not in it"
    return Subject(
        name=model,
        kind="checkpoint",
        model_type=found.model_type,
        num_parameters=found.num_parameters,
        target=found.target,
        dtype=found.dtype,
        quantize=found.quantize,
        max_model_len=found.max_model_len,
        hidden_size=found.hidden_size,
        workload=found.workload,
        native=found.native,
        resident_bytes=resident,
        scratch_width=found.widest,
        query_width=found.query_width,
        host_bytes=host | _build_bytes(found.target, found.phase_bytes),
        notes=(spared,) if found.calibrated else (),
    )


def _of_bundle(folder: Path, wanted: Wanted, progress: Progress) -> Subject:
    from trtllm_lite.runtime.bundle import open_bundle
    from trtllm_lite.tools.plan_bundle import bundle_workloads, phase_bytes

    for name in FIXED_BY_A_BUNDLE:
        if getattr(wanted, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')}: {folder} is a bundle, which is finished; leave it "
                "out, or give the checkpoint"
            )
    progress.step("read the bundle")
    opened = open_bundle(folder, check_hashes=False)
    manifest = opened.manifest
    _check_target(manifest.target, wanted, f"{folder}, a bundle for {manifest.target}")
    proved = manifest.limits.max_model_len
    if wanted.max_model_len is not None and wanted.max_model_len > proved:
        raise UsageError(f"--max-model-len: got {wanted.max_model_len}; the bundle is for {proved}")
    workload, native = bundle_workloads(opened)
    phases = phase_bytes(opened)
    return Subject(
        name=str(folder),
        kind="bundle",
        model_type=manifest.model.model_type,
        num_parameters=manifest.model.num_parameters,
        target=manifest.target,
        dtype=manifest.dtype,
        quantize=manifest.quantization.decode,
        max_model_len=wanted.max_model_len or proved,
        hidden_size=manifest.model.hidden_size,
        workload=workload,
        native=native,
        resident_bytes=_resident(manifest.target, phases, workload.weight_bytes),
        scratch_width=None,
        query_width=None,
        host_bytes=_build_bytes(manifest.target, phases),
    )


def _build_bytes(target: str, phases: Mapping[str, int]) -> dict[str, int]:
    if target != "tensorrt":
        return {}
    return {"build": BUILD_BASE_BYTES + BUILD_COPIES * max(phases.values())}


def _resident(target: str, phases: Mapping[str, int], weight_bytes: int) -> int:
    """TensorRT's plans each hold their weights."""
    return sum(phases.values()) if target == "tensorrt" else weight_bytes


def _check_target(target: str, wanted: Wanted, what: str) -> None:
    if target == CPU and wanted.gpu is not None:
        raise UsageError(
            f"--gpu: {what} runs on a CPU; leave it out, or plan the checkpoint with --target "
            "tensorrt or cuda"
        )
    if target != CPU and wanted.gpu is None:
        raise UsageError(f"--gpu: {what} needs one; name it, or all")
    if wanted.threads is not None and target != CPU:
        raise UsageError(f"--threads: it is for a CPU; {what} runs on a GPU")
