"""What is to be built: options, everything that plans depend on, and the memory that is known then.

There are three ways to hold the weights: each plan has its own, all plans read one copy as inputs
(`share_weights`), or one plan runs all phases (`single_engine`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.attention_patch import AttentionForm
from trtllm_lite.runtime.engines.memory import Ledger, ledger_before
from trtllm_lite.runtime.engines.profiles import (
    EngineLimits,
    most_logits,
    profiles,
    profiles_of_single,
)
from trtllm_lite.runtime.engines.record import (
    EXACT,
    MASKS,
    SHARED,
    SINGLE,
    USER_ALLOCATION,
    EngineKey,
    GraphKey,
    Profile,
    SharedWeight,
)
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.engines.weight_inputs import check_gpus, shared_weights
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.manifest import GraphSpec

TARGET = "tensorrt"


@dataclass(frozen=True)
class BuildOptions:
    """What to build for. gpus: names such as "sm89"; driver: of the GPU of this machine where it
    takes part, else None. force: build again what is there. form: None is "lengths" where TensorRT
    has them. share_weights: plans read one copy of the weights. single_engine: one plan, of the
    extend graph, runs all phases."""

    gpus: tuple[str, ...]
    limits: EngineLimits
    driver: str | None = None
    timing_cache: Path | None = None
    force: bool = False
    form: AttentionForm | None = None
    share_weights: bool = False
    single_engine: bool = False


def check_target(bundle: Bundle) -> None:
    """Raises UsageError for a bundle that no plans can be built from."""
    if bundle.manifest.target != TARGET:
        raise UsageError(
            f"{bundle.folder} was exported for the target {bundle.manifest.target!r}, plans need "
            f"{TARGET!r}: trtllm-lite export MODEL --target {TARGET} -o DIR"
        )


def engine_key(bundle: Bundle, options: BuildOptions, trt: TensorRT) -> EngineKey:
    """Everything that the plans will depend on. Raises UsageError for a bundle of another target,
    and for what this TensorRT or these GPUs cannot do."""
    check_target(bundle)
    manifest = bundle.manifest
    check_gpus(bundle.graph_path(manifest.graphs[0].phase).read_bytes(), options.gpus)
    files = {entry.path: entry for entry in manifest.files}
    limits = options.limits
    return EngineKey(
        flavour=trt.flavour,
        version=trt.version,
        gpus=options.gpus,
        driver=options.driver,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        capacity=limits.capacity,
        weights=files[manifest.weights],
        graphs=tuple(
            GraphKey(graph.phase, files[graph.file], boxes)
            for graph, boxes in _boxes(bundle, options)
        ),
        flags=_flags(bundle, options, trt),
    )


def _boxes(
    bundle: Bundle, options: BuildOptions
) -> Iterator[tuple[GraphSpec, tuple[Profile, ...]]]:
    """The graphs that plans are made of, each with its profiles."""
    for graph in bundle.manifest.graphs:
        if not options.single_engine:
            yield graph, profiles(graph, options.limits)
        elif graph.phase == "extend":
            yield graph, profiles_of_single(graph, options.limits)


def _flags(bundle: Bundle, options: BuildOptions, trt: TensorRT) -> tuple[str, ...]:
    if options.timing_cache is not None and trt.flavour == "tensorrt_rtx":
        raise UsageError(
            f"--timing-cache: {trt.words} times no kernels when it builds, so it keeps no timings; "
            "leave it out"
        )
    form = options.form or ("lengths" if trt.has_row_lengths else "mask")
    if form == "lengths" and not trt.has_row_lengths:
        raise UsageError(
            f"--attention lengths: {trt.words} has none; leave it out, or install TensorRT 11"
        )
    _check_single(bundle, options)
    asked = {
        MASKS: form == "mask",
        EXACT: bundle.manifest.dtype == "float32",
        SHARED: options.share_weights,
        SINGLE: options.single_engine,
        USER_ALLOCATION: trt.has_user_allocation,
    }
    return tuple(sorted(flag for flag, wanted in asked.items() if wanted))


def _check_single(bundle: Bundle, options: BuildOptions) -> None:
    if options.share_weights and options.single_engine:
        raise UsageError(
            "--share-weights with --single-engine: one plan has its weights once anyway; leave one "
            "of them out"
        )
    if options.single_engine and all(g.phase != "extend" for g in bundle.manifest.graphs):
        raise UsageError(
            "--single-engine: this bundle has no extend graph, which would run all phases; export "
            "the model again, or leave it out"
        )


def weights_to_share(bundle: Bundle, key: EngineKey) -> tuple[SharedWeight, ...]:
    """What the plans of this key read as inputs: nothing where each holds its own weights. Raises
    UsageError for weights that lose too much as inputs."""
    if SHARED not in key.flags:
        return ()
    return shared_weights(bundle.graph_path(g.phase).read_bytes() for g in key.graphs)


def planned_ledger(bundle: Bundle, key: EngineKey, limits: EngineLimits) -> Ledger:
    """The memory of plans that are not built yet. Raises UsageError as `weights_to_share`."""
    largest = {graph.phase: most_logits(graph.profiles) for graph in key.graphs}
    return ledger_before(bundle, limits, largest, weights_to_share(bundle, key))
