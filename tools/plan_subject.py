"""What `plan` plans: a checkpoint's export, with fake weights, or a finished bundle."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_lite.runtime.engines.profiles import engine_limits
from trtllm_lite.runtime.engines.weight_inputs import NOT_INT4
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.kv_dtype import KVChoice, KVDtype, choose_kv_dtype
from trtllm_lite.runtime.manifest import MANIFEST_NAME, GraphSpec
from trtllm_lite.runtime.native_table import Rounding
from trtllm_lite.runtime.planning.memory import GraphWeights, build_bytes
from trtllm_lite.runtime.planning.workload import Workload
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.failures import needs_extra
from trtllm_lite.tools.plan_gpus import gpu_here

if TYPE_CHECKING:
    from trtllm_lite.exporter.outline import Outline

CPU, TENSORRT = "cpu", "tensorrt"
FIXED_BY_A_BUNDLE = ("target", "quantize", "dtype", "revision")
EXPORT_BASE_BYTES = 2**30
"""Estimate: torch, transformers and a traced graph."""
SEQS = 16
"""Requests at the same time, where nobody says."""


@dataclass(frozen=True)
class Wanted:
    """The options of `plan`; None is the default."""

    gpu: str | None = None
    threads: int | None = None
    rounding: Rounding | None = None
    target: str | None = None
    quantize: str | None = None
    dtype: str | None = None
    kv_dtype: KVChoice | None = None
    revision: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    share_weights: bool = False
    single_engine: bool = False
    input_len: int = 512
    output_len: int = 128


@dataclass(frozen=True)
class Subject:
    """What is planned. `workload`: over ONNX Runtime's or TensorRT's operators, `native`: over our
    own kernels, where there are graphs for them. weights: of the graphs, whose tables are `graphs`.
    scratch_width: the widest layer, None where it is not known, and query_width: all query heads
    of a token; host_bytes: memory of the host by what it is needed for."""

    name: str
    kind: str
    model_type: str
    num_parameters: int
    target: str
    dtype: str
    quantize: str
    max_model_len: int
    max_num_seqs: int
    hidden_size: int
    workload: Workload
    native: Workload | None
    weights: GraphWeights
    graphs: tuple[GraphSpec, ...]
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
    if wanted.share_weights and found.quantize.startswith("int4"):
        raise UsageError(NOT_INT4)
    longest = wanted.input_len + wanted.output_len
    if longest > found.max_model_len:
        raise UsageError(
            f"--input-len + --output-len: got {wanted.input_len} + {wanted.output_len} = {longest} "
            f"tokens; allowed: {found.max_model_len}; give fewer, or a longer --max-model-len"
        )
    return found


def _of_checkpoint(model: str, wanted: Wanted, console: Console, progress: Progress) -> Subject:
    from trtllm_lite.tools.export import libraries_quiet

    target = wanted.target or (CPU if wanted.gpu is None else TENSORRT)
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
            max_num_seqs=wanted.max_num_seqs or SEQS,
            revision=wanted.revision,
            dry_run=True,
        )
        return _from_outline(model, outline(options, progress), wanted)


def _from_outline(model: str, found: "Outline", wanted: Wanted) -> Subject:
    host = {
        "export": EXPORT_BASE_BYTES + 2 * found.largest_tensor_bytes,
        "verify": EXPORT_BASE_BYTES + 4 * found.num_parameters + found.workload.weight_bytes,
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
        max_num_seqs=wanted.max_num_seqs or SEQS,
        hidden_size=found.hidden_size,
        workload=found.workload,
        native=found.native,
        weights=found.weights,
        graphs=found.graphs,
        scratch_width=found.widest,
        query_width=found.query_width,
        host_bytes=host | _build_bytes(found.target, found.weights, found.workload),
        notes=(spared,) if found.calibrated else (),
    )


def _of_bundle(folder: Path, wanted: Wanted, progress: Progress) -> Subject:
    from trtllm_lite.runtime.bundle import open_bundle
    from trtllm_lite.runtime.native_weights import cache_dtypes
    from trtllm_lite.tools.plan_bundle import bundle_workloads, graph_weights, widest

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
    limits = engine_limits(manifest.limits, wanted.max_num_seqs, wanted.max_model_len, None)
    workload, native = bundle_workloads(opened)
    if wanted.kv_dtype not in (None, "auto", workload.kv_dtype if native is None else None):
        native = _with_cache(native, wanted.kv_dtype, cache_dtypes(opened), folder)
    weights = graph_weights(opened)
    return Subject(
        name=str(folder),
        kind="bundle",
        model_type=manifest.model.model_type,
        num_parameters=manifest.model.num_parameters,
        target=manifest.target,
        dtype=manifest.dtype,
        quantize=manifest.quantization.decode,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        hidden_size=manifest.model.hidden_size,
        workload=workload,
        native=native,
        weights=weights,
        graphs=manifest.graphs,
        scratch_width=widest(opened),
        query_width=None,
        host_bytes=_build_bytes(manifest.target, weights, workload),
    )


def _with_cache(
    native: Workload | None, wanted: KVChoice | None, available: tuple[KVDtype, ...], folder: Path
) -> Workload:
    """Over another cache that the bundle's native graphs have. Raises UsageError for others."""
    if native is None or wanted is None:
        raise UsageError(
            f"--kv-dtype: got {wanted}; only the native kernels have such a cache, and {folder} "
            "has no graphs for them; leave it out"
        )
    return replace(native, kv_dtype=choose_kv_dtype(wanted, available))


def _build_bytes(target: str, weights: GraphWeights, workload: Workload) -> dict[str, int]:
    if target != TENSORRT:
        return {}
    return {"build": build_bytes(weights.largest, len(workload.layers))}


def _check_target(target: str, wanted: Wanted, what: str) -> None:
    """Raises UsageError for options of another kind of machine."""
    if target == CPU and wanted.gpu is not None:
        raise UsageError(
            f"--gpu: {what} runs on a CPU; leave it out, or plan the checkpoint with --target "
            "tensorrt or cuda"
        )
    for name in ("threads", "rounding"):
        if getattr(wanted, name) is not None and target != CPU:
            raise UsageError(f"--{name}: it is for a CPU; {what} runs on a GPU; leave it out")
    for name in ("share_weights", "single_engine"):
        if getattr(wanted, name) and target != TENSORRT:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag}: {what} has no plans of TensorRT; leave it out")
    if wanted.share_weights and wanted.single_engine:
        raise UsageError(
            "--share-weights with --single-engine: one plan has its weights once anyway; leave one "
            "of them out"
        )
    if target != CPU and wanted.gpu is None:
        gpu_here()
