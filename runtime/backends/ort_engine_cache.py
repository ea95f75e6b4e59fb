"""Engines that ONNX Runtime's TensorRT providers keep for the next time.

They are code for the GPU, and the providers load whatever they find. So each set has a folder of
its own, named by all that it depends on, which nobody but its owner may write to, and a record of
the hashes of what was built there: a file that is not as it was is removed before the provider sees
it, and is built again.
"""

import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.cache_entry import read_json, write_json
from trtllm_lite.runtime.engines.record import ENGINES_FOLDER
from trtllm_lite.runtime.manifest import Phase

RECORD = "built.json"
PREFIX = "onnxruntime-"

_log = logging.getLogger(__name__)


class EngineCache:
    """The engine of one graph of a bundle for one set of settings. `folder` is None where nothing
    can be kept, which is logged."""

    def __init__(self, bundle: Bundle, phase: Phase, settings: Sequence[str]) -> None:
        manifest = bundle.manifest
        hashes = {file.path: file.sha256 for file in manifest.files}
        files = (manifest.weights, manifest.graph(phase).file)
        key = "\n".join([phase, *settings, *(f"{name} {hashes.get(name)}" for name in files)])
        name = PREFIX + hashlib.sha256(key.encode()).hexdigest()[:32]
        self.folder: Path | None = _own_folder(bundle.folder / ENGINES_FOLDER / name)
        if self.folder is not None:
            _remove_others(self.folder)

    def seal(self) -> None:
        """Record what lies in the folder now, as built here."""
        if self.folder is None:
            return
        found = {path.name: _hash(path) for path in _files(self.folder)}
        try:
            write_json(self.folder / RECORD, found)
        except OSError as error:
            _log.warning("the engines in %s are built again next time: %s", self.folder, error)


def _own_folder(folder: Path) -> Path | None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        _log.warning("engines are built at every start: %s", error)
        return None
    others = stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & others:
        _log.warning(
            "engines are built at every start: %s has to be a folder that only its owner, this "
            "user, can write to",
            folder,
        )
        return None
    return folder


def _remove_others(folder: Path) -> None:
    record = read_json(folder / RECORD) or {}
    for path in _files(folder):
        if record.get(path.name) != _hash(path):
            _log.warning("%s is not what was built here; it is removed and built again", path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _files(folder: Path) -> list[Path]:
    """All but the record."""
    return [path for path in sorted(folder.iterdir()) if path.name != RECORD]


def _hash(path: Path) -> str:
    """Of a file's bytes; of nothing else there is one."""
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
