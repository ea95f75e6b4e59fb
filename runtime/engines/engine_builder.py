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
from trtllm_lite.runtime.engines.engine_key import (
    BuildOptions,
    engine_key,
    planned_ledger,
    weights_to_share,
)
from trtllm_lite.runtime.engines.memory import Ledger, ledger_after
from trtllm_lite.runtime.engines.plan_builder import BuiltPlan, PlanRequest, build_plan
from trtllm_lite.runtime.engines.record import (
    ENGINES_FOLDER,
    EXACT,
    MASKS,
    RECORD_NAME,
    USER_ALLOCATION,
    EngineKey,
    EngineRecord,
    PlanRecord,
    SharedWeight,
    render_record,
)
from trtllm_lite.runtime.engines.store import StoredEngine, read_engine
from trtllm_lite.runtime.engines.timing_cache import TimingCacheFile
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.errors import BundleError, TrtllmLiteError
from trtllm_lite.runtime.file_lock import locked
from trtllm_lite.runtime.manifest import FileEntry, Phase
from trtllm_lite.runtime.progress import Progress

LOCK_NAME = ".lock"
LOCK_TIMEOUT_S = 3600.0
PRODUCER = f"trtllm-lite {__version__}"
MORE_THAN_ONCE = 1.25
"""Times the weights of the graph. What a plan has besides them is far less."""
_PARTIAL = ".partial-"

PlanBuilder = Callable[[TensorRT, PlanRequest, Progress], BuiltPlan]
"""As `build_plan`."""


@dataclass(frozen=True)
class BuildReport:
    """The plans that are there now. made: whether they were built by this call."""

    engine: StoredEngine
    ledger: Ledger
    made: bool


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
            weights = weights_to_share(bundle, key)
            with _workspace(folder, key.fingerprint) as partial:
                plans = []
                for request in _requests(bundle, key, options, weights):
                    progress.step(f"build the {request.graph.phase} plan")
                    # A plan is as large as its weights: no name keeps it while the next is built.
                    phase = request.graph.phase
                    plans.append(_write_plan(partial, phase, build(trt, request, progress)))
                _write_record(partial, EngineRecord(key, tuple(plans), PRODUCER, weights))
            stored = read_engine(bundle.folder, key.fingerprint)
    ledger = ledger_after(planned, stored.record.plans)
    if key.is_single and ledger.weights > MORE_THAN_ONCE * planned.weights:
        progress.note(
            f"the plan holds {ledger.weights / planned.weights:.1f} times the weights of its "
            "graph: this TensorRT keeps them in another order for some of the sizes"
        )
    return BuildReport(stored, ledger, made)


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


def _requests(
    bundle: Bundle, key: EngineKey, options: BuildOptions, weights: tuple[SharedWeight, ...]
) -> Iterator[PlanRequest]:
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
            user_allocation=USER_ALLOCATION in key.flags,
            weights=weights,
        )


def _write_record(folder: Path, record: EngineRecord) -> None:
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
