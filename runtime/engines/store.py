"""The sets of plans of a bundle on disk: which there are, which one fits, and its bytes.

A plan is code for the GPU. It is handed out only from a record that fits the bundle, the TensorRT
that is installed and the GPU, and only if its bytes have the size and the SHA-256 of the record.
Nothing is opened through a link.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.bundle_files import open_folder, open_inside, read_small
from trtllm_lite.runtime.engines.record import (
    ENGINES_FOLDER,
    MAX_RECORD_BYTES,
    RECORD_NAME,
    EngineKey,
    EngineRecord,
    Flavour,
    parse_record,
)
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import FileEntry, Phase

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Machine:
    """What would run a plan: the TensorRT that is installed and the GPU, both exactly."""

    flavour: Flavour
    version: str
    gpu: str


@dataclass(frozen=True)
class Need:
    """Limits of the engine that wants plans; see `EngineKey`."""

    max_num_seqs: int
    capacity: int


@dataclass(frozen=True)
class StoredEngine:
    """A complete set of plans in `folder`, a path `engines/<fingerprint>` below `root`."""

    root: Path
    folder: str
    record: EngineRecord

    @property
    def built_at(self) -> int:
        """When the record was written, in nanoseconds."""
        return (self.root / self.folder / RECORD_NAME).stat().st_mtime_ns

    def plan_bytes(self, phase: Phase) -> bytes:
        """The bytes of one plan, compared with their hash. Raises BundleError when there is none,
        or not the one that was built."""
        plan = self.record.plan(phase)
        if plan is None:
            raise BundleError(self.folder, f"has no plan of phase {phase}; {build_hint(self.root)}")
        with open_folder(self.root) as root:
            return self._checked(root, plan.file)

    def check_plans(self) -> None:
        """Compare every plan with its hash. Raises BundleError for the first that differs."""
        for plan in self.record.plans:
            self.plan_bytes(plan.phase)

    def _checked(self, root: int, entry: FileEntry) -> bytes:
        path = f"{self.folder}/{entry.path}"
        with open_inside(root, path, path) as fd:
            size = os.fstat(fd).st_size
            if size == entry.size:
                with open(fd, "rb", closefd=False) as file:
                    data = file.read(entry.size + 1)
                if hashlib.sha256(data).hexdigest() == entry.sha256:
                    return data
        text = "is not the plan that was built here, and is not loaded: it was changed or damaged"
        raise BundleError(path, f"{text}; {build_hint(self.root)}")


def build_hint(root: Path) -> str:
    """What to do about plans that cannot be used."""
    return f"build them with `trtllm-lite build {root}`"


def stored_engines(root: Path) -> Iterator[StoredEngine]:
    """Every complete set of plans of the bundle in `root`. Raises BundleError for a record that
    cannot be read or is not the one of its folder."""
    return (read_engine(root, name) for name in _fingerprints(root))


def _fingerprints(root: Path) -> list[str]:
    try:
        names = sorted(path.name for path in (root / ENGINES_FOLDER).iterdir())
    except OSError:
        return []
    return [name for name in names if _FINGERPRINT.fullmatch(name)]


def read_engine(root: Path, fingerprint: str) -> StoredEngine:
    """One set of plans; the plans themselves are not looked at. Raises BundleError."""
    folder = f"{ENGINES_FOLDER}/{fingerprint}"
    path = f"{folder}/{RECORD_NAME}"
    with open_folder(root) as fd:
        data = read_small(fd, path, path, MAX_RECORD_BYTES)
    try:
        record = parse_record(data)
    except BundleError as error:
        raise BundleError(path, f"{error}; {_remove_hint(root, folder)}") from None
    if record.key.fingerprint != fingerprint:
        text = f"belongs to another folder, {record.key.fingerprint}; {_remove_hint(root, folder)}"
        raise BundleError(path, text)
    return StoredEngine(root, folder, record)


def find_engine(bundle: Bundle, machine: Machine, need: Need) -> StoredEngine:
    """The plans that this machine can load for an engine of these limits: where several fit, those
    of the smallest slots, and of these the ones built last. Raises BundleError with the cause and
    the command to run."""
    fitting, causes = list[StoredEngine](), list[str]()
    for name in _fingerprints(bundle.folder):
        try:
            stored = read_engine(bundle.folder, name)
        except BundleError as error:
            causes.append(str(error))
            continue
        cause = misfit(stored.record.key, bundle, machine, need)
        if cause is None:
            fitting.append(stored)
        else:
            causes.append(f"{stored.folder} {cause}")
    if fitting:
        return min(fitting, key=lambda s: (s.record.key.capacity, -s.built_at))
    said = f"no plans fit: {'; '.join(causes)}" if causes else "no TensorRT plans"
    raise BundleError(ENGINES_FOLDER, f"{said}; {build_hint(bundle.folder)}")


def misfit(key: EngineKey, bundle: Bundle, machine: Machine, need: Need) -> str | None:
    """Why plans of this key cannot be used, in words that follow their name; None when they can."""
    return _stale(key, bundle) or _foreign(key, machine) or _too_small(key, need)


def _stale(key: EngineKey, bundle: Bundle) -> str | None:
    """Built from other files than the bundle has now."""
    now = {entry.path: entry for entry in bundle.manifest.files}
    phases = {graph.phase: graph.file for graph in bundle.manifest.graphs}
    if key.weights != now.get(bundle.manifest.weights):
        return f"was built from other weights than {bundle.manifest.weights} has now"
    for phase, file in phases.items():
        if key.is_single and phase != "extend":
            continue
        graph = key.graph(phase)
        if graph is None:
            return f"has no plan for the {phase} graph"
        if graph.graph != now.get(file):
            return f"was built from another {phase} graph than {file} is now"
    return None


def _foreign(key: EngineKey, machine: Machine) -> str | None:
    """Built by another TensorRT, or for other GPUs."""
    if key.flavour != machine.flavour:
        return f"was built by {key.flavour}, this machine has {machine.flavour}"
    if key.version != machine.version:
        return f"was built by {key.flavour} {key.version}, this machine has {machine.version}"
    if machine.gpu not in key.gpus:
        return f"was built for {', '.join(key.gpus)}, this GPU is {machine.gpu}"
    return None


def _too_small(key: EngineKey, need: Need) -> str | None:
    if need.max_num_seqs > key.max_num_seqs:
        return f"takes {key.max_num_seqs} requests at once, {need.max_num_seqs} are asked for"
    if need.capacity > key.capacity:
        parts = "--max-model-len and --max-num-batched-tokens of the build together"
        return f"holds {key.capacity} tokens in a slot ({parts}), {need.capacity} are asked for"
    return None


def _remove_hint(root: Path, folder: str) -> str:
    return f"remove {root / folder} and build again: `trtllm-lite build {root}`"
