"""All plans of a bundle, into `engines/<fingerprint>/` beside the ONNX files.

The folder is complete or not there: work happens beside it, the record is written last, a rename
puts it in place. Two builds of one key do the work once.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite import __version__
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.attention_patch import AttentionForm
from trtllm_lite.runtime.engines.memory import Ledger, ledger_after, ledger_before
from trtllm_lite.runtime.engines.plan_builder import BuiltPlan, PlanRequest, build_plan
from trtllm_lite.runtime.engines.profiles import EngineLimits, profiles
from trtllm_lite.runtime.engines.record import (
    ENGINES_FOLDER,
    RECORD_NAME,
    EngineKey,
    EngineRecord,
    GraphKey,
    PlanRecord,
    Profile,
    render_record,
)
from trtllm_lite.runtime.engines.store import StoredEngine, read_engine
from trtllm_lite.runtime.engines.timing_cache import TimingCacheFile
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.errors import BundleError, TrtllmLiteError, UsageError
from trtllm_lite.runtime.file_lock import locked
from trtllm_lite.runtime.manifest import FileEntry, Phase
from trtllm_lite.runtime.progress import Progress

TARGET = "tensorrt"
MASKS, EXACT = "attention_masks", "no_tf32"
"""Flags of a key."""
LOCK_NAME = ".lock"
LOCK_TIMEOUT_S = 3600.0
_PARTIAL = ".partial-"

PlanBuilder = Callable[[TensorRT, PlanRequest, Progress], BuiltPlan]
"""As `build_plan`."""


@dataclass(frozen=True)
class BuildOptions:
    """What to build for. gpus: names such as "sm89"; driver: of the GPU of this machine where it
    takes part, else None. force: build again what is there. form: None is "lengths" where TensorRT
    has them."""

    gpus: tuple[str, ...]
    limits: EngineLimits
    driver: str | None = None
    timing_cache: Path | None = None
    force: bool = False
    form: AttentionForm | None = None


@dataclass(frozen=True)
class BuildReport:
    """The plans that are there now. made: whether they were built by this call."""

    engine: StoredEngine
    ledger: Ledger
    made: bool


def check_target(bundle: Bundle) -> None:
    """Raises UsageError for a bundle that no plans can be built from."""
    if bundle.manifest.target != TARGET:
        raise UsageError(
            f"{bundle.folder} was exported for the target {bundle.manifest.target!r}, plans need "
            f"{TARGET!r}: trtllm-lite export MODEL --target {TARGET} -o DIR"
        )


def engine_key(bundle: Bundle, options: BuildOptions, trt: TensorRT) -> EngineKey:
    """Everything that the plans will depend on. Raises UsageError for a bundle of another target
    and for what this TensorRT cannot do."""
    check_target(bundle)
    manifest = bundle.manifest
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
            GraphKey(graph.phase, files[graph.file], profiles(graph, limits))
            for graph in manifest.graphs
        ),
        flags=_flags(bundle, options, trt),
    )


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
    exact = bundle.manifest.dtype == "float32"
    return (*([MASKS] if form == "mask" else []), *([EXACT] if exact else []))


def planned_ledger(bundle: Bundle, key: EngineKey, limits: EngineLimits) -> Ledger:
    """The memory of plans that are not built yet."""
    return ledger_before(bundle, limits, {g.phase: _largest(g.profiles) for g in key.graphs})


def _largest(ladder: tuple[Profile, ...]) -> int:
    """The most logits of a run: rows times logits a row, in the largest of the boxes."""

    def most(profile: Profile, name: str) -> int:
        found = profile.range_of(name)
        return 1 if found is None else found.max

    return max(most(p, "batch") * most(p, "num_logits") for p in ladder)


def build_engines(
    bundle: Bundle,
    options: BuildOptions,
    trt: TensorRT,
    progress: Progress,
    build: PlanBuilder = build_plan,
) -> BuildReport:
    """Build what is not there yet. Raises UsageError, BuildError, OSError; leaves nothing half
    done, by whatever exception it ends."""
    key = engine_key(bundle, options, trt)
    planned = planned_ledger(bundle, key, options.limits)
    folder = bundle.folder / ENGINES_FOLDER
    _make_folder(folder)
    with locked(folder / LOCK_NAME, LOCK_TIMEOUT_S, lambda: _say_waiting(progress)):
        stored = None if options.force else _stored(bundle, key, progress)
        made = stored is None
        if stored is None:
            with _workspace(folder, key.fingerprint) as partial:
                plans = []
                for request in _requests(bundle, key, options):
                    progress.step(f"build the {request.graph.phase} plan")
                    built = build(trt, request, progress)
                    plans.append(_write_plan(partial, request.graph.phase, built))
                _write_record(partial, key, tuple(plans))
            stored = read_engine(bundle.folder, key.fingerprint)
    return BuildReport(stored, ledger_after(planned, stored.record.plans), made)


def _make_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if folder.is_symlink():
        raise BundleError(ENGINES_FOLDER, "is a symbolic link; put a folder there")


def _say_waiting(progress: Progress) -> None:
    progress.note("waiting for another process that builds plans of this bundle")


def _stored(bundle: Bundle, key: EngineKey, progress: Progress) -> StoredEngine | None:
    """Plans of this key that are whole; None when there are none."""
    if not (bundle.folder / ENGINES_FOLDER / key.fingerprint).exists():
        return None
    try:
        stored = read_engine(bundle.folder, key.fingerprint)
        stored.check_plans()
    except BundleError as error:
        progress.note(f"building again what is damaged: {error}")
        return None
    return stored


@contextmanager
def _workspace(folder: Path, fingerprint: str) -> Iterator[Path]:
    """A new folder that takes the place of `fingerprint` at a normal exit. Needs the lock, under
    which all that other builds left behind is removed."""
    for stale in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial, target = folder / f"{_PARTIAL}{os.getpid()}", folder / fingerprint
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rename(folder / f"{_PARTIAL}old-{os.getpid()}")
        partial.rename(target)
    finally:
        for stale in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(stale, ignore_errors=True)


def _requests(bundle: Bundle, key: EngineKey, options: BuildOptions) -> Iterator[PlanRequest]:
    timing = None if options.timing_cache is None else TimingCacheFile(options.timing_cache)
    for graph in key.graphs:
        yield PlanRequest(
            graph=bundle.manifest.graph(graph.phase),
            path=bundle.graph_path(graph.phase),
            profiles=graph.profiles,
            capacity=key.capacity,
            gpus=key.gpus,
            exact=EXACT in key.flags,
            form="mask" if MASKS in key.flags else "lengths",
            timing=timing,
        )


def _write_record(folder: Path, key: EngineKey, plans: tuple[PlanRecord, ...]) -> None:
    record = EngineRecord(key, plans, f"trtllm-lite {__version__}")
    _write(folder / RECORD_NAME, render_record(record))


def _write_plan(folder: Path, phase: Phase, built: BuiltPlan) -> PlanRecord:
    name = f"{phase}.plan"
    _write(folder / name, built.data)
    patched = built.patched
    return PlanRecord(
        phase=phase,
        file=FileEntry(name, built.data.nbytes, hashlib.sha256(built.data).hexdigest()),
        attention_layers=patched.layers,
        lengths_set=patched.lengths_set,
        lower_right=patched.lower_right,
        decomposed=patched.layers if built.decomposed else 0,
        weights_bytes=built.weights_bytes,
        scratch_bytes=built.scratch_bytes,
        activation_bytes=built.activation_bytes,
    )


def _write(path: Path, data: bytes | memoryview) -> None:
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"cannot write {path.name} in {path.parent.parent}: {error.strerror}"
        raise TrtllmLiteError(text) from error
