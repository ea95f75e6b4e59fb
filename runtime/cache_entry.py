"""One entry of the host cache: a folder of files and the stamp that says what they are.

The stamp is written last. Files are compared with it by identity, which reads nothing; files that
were copied (an image layer, a moved bundle) have another identity and are compared by sha256.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.file_identity import FileIdentity, sha256_of, sync

STAMP_NAME = "stamp.json"
MAX_STAMP_BYTES = 2**20


@dataclass(frozen=True)
class EntryKey:
    """What an entry was made from: sha256 of bundle.json, the machine's instruction set, and the
    preparer's name and version."""

    format: int
    bundle: str
    host: str
    preparer: str
    version: str


def write_stamp(folder: Path, key: EntryKey) -> None:
    """Put every file of the folder on the disk and describe it. Raises OSError."""
    files = {}
    for path in _regular_files(folder):
        sync(path)
        files[path.name] = [*FileIdentity.of(path).as_list(), sha256_of(path)]
    if not files:
        raise OSError("the preparer made no file")
    write_json(folder / STAMP_NAME, {"key": asdict(key), "files": files})


def is_good(folder: Path, key: EntryKey) -> bool:
    """Whether the folder holds exactly what its stamp says, made from `key`."""
    try:
        stamp = read_json(folder / STAMP_NAME)
        if stamp is None or stamp.get("key") != asdict(key):
            return False
        files = stamp.get("files")
        return isinstance(files, dict) and _files_match(folder, files, key)
    except OSError:
        return False


def stamp_key(folder: Path) -> EntryKey | None:
    """What the entry says that it was made from; None when it does not say."""
    try:
        stamp = read_json(folder / STAMP_NAME)
        return None if stamp is None else EntryKey(**stamp["key"])
    except (OSError, KeyError, TypeError):
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small JSON file; None where it is missing or something else."""
    try:
        FileIdentity.of(path)
        with path.open("rb") as file:
            value = json.loads(file.read(MAX_STAMP_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file at once. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _files_match(folder: Path, files: dict[str, Any], key: EntryKey) -> bool:
    present = {p.name for p in folder.iterdir()} - {STAMP_NAME}
    if present != files.keys():
        return False
    moved = [n for n in present if FileIdentity.of(folder / n).as_list() != files[n][:-1]]
    if any(FileIdentity.of(folder / n).size != files[n][0] for n in moved):
        return False
    if any(sha256_of(folder / name) != files[name][-1] for name in moved):
        return False
    if moved:
        _refresh(folder, key, files)
    return True


def _refresh(folder: Path, key: EntryKey, files: dict[str, Any]) -> None:
    """Note the identities that the files have here. A folder that cannot be written to stays as
    it is: its files are hashed again next time."""
    known = {n: [*FileIdentity.of(folder / n).as_list(), files[n][-1]] for n in files}
    try:
        write_json(folder / STAMP_NAME, {"key": asdict(key), "files": known})
    except OSError:
        return


def _regular_files(folder: Path) -> list[Path]:
    paths = sorted(folder.iterdir())
    for path in paths:
        FileIdentity.of(path)
    return paths
