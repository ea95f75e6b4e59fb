"""The host cache: files made once from a bundle for the machine that runs it.

It lies in `<bundle>/.cache`, or where that cannot be written in the user's cache folder, under the
bundle's digest. An entry appears all at once, by a rename, and is used only while its stamp fits;
one that does not is made again. Entries hold weights and graphs, no code: what lies in a bundle's
folder is trusted as much as the bundle is.
"""

import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.bundle_files import open_folder, read_small
from trtllm_lite.runtime.cache_entry import (
    EntryKey,
    is_good,
    read_json,
    stamp_key,
    write_json,
    write_stamp,
)
from trtllm_lite.runtime.file_lock import locked
from trtllm_lite.runtime.host import instruction_set
from trtllm_lite.runtime.manifest import MANIFEST_NAME
from trtllm_lite.runtime.manifest_io import MAX_MANIFEST_BYTES
from trtllm_lite.runtime.progress import NoProgress, Progress

FORMAT = 1
FOLDER_NAME = ".cache"
LOCK_NAME = ".lock"
LOCK_TIMEOUT_S = 600.0
_ENTRY = re.compile(r"[a-z0-9_]+-[0-9a-f]{8}-[0-9a-f]{16}")
_PARTIAL = ".partial-"

_log = logging.getLogger(__name__)


class PrepareError(Exception):
    """A preparer cannot make its files from this bundle. `prepared` catches it: the bundle is then
    used without them."""


@dataclass(frozen=True)
class Preparer:
    """Makes the files of one entry into an empty folder.

    name: [a-z0-9_]+; a new entry replaces older ones of the same name. version: changes whenever
    the same bundle gives other files, so it holds the versions of the libraries that make them.
    prepare: raises PrepareError or OSError.
    """

    name: str
    version: str
    prepare: Callable[[Path, Progress], None]


@dataclass(frozen=True)
class CacheEntry:
    """Files that one preparer made: where they lie, and how many bytes they have."""

    folder: Path
    preparer: str
    version: str
    size: int


@dataclass(frozen=True)
class HostCache:
    """The cache of one bundle on this machine. `roots` are folders in the order of preference."""

    bundle_digest: str
    host_digest: str
    roots: tuple[Path, ...]

    def prepared(self, preparer: Preparer, progress: Progress | None = None) -> Path | None:
        """The folder with the preparer's files, made now if need be.

        None when they cannot be had (no space, nowhere to write, PrepareError): said once, as a
        note of `progress` and in the log. Raises nothing else than what is a fault in a preparer.
        """
        progress = progress or NoProgress()
        key = self._key(preparer)
        for root in self.roots:
            if is_good(root / _entry_name(key), key):
                return root / _entry_name(key)
        reasons = []
        for root in self.roots:
            try:
                return self._make(root, key, preparer, progress)
            except OSError as error:
                reasons.append(f"{root}: {error.strerror or error}")
            except PrepareError as error:
                reasons.append(str(error))
                break
        note = f"loading without the host cache ({preparer.name}): {'; '.join(reasons)}"
        progress.note(note)
        _log.warning("%s", note)
        return None

    def discard(self, preparer: Preparer) -> None:
        """Forget an entry that turned out to be of no use, so that it is made again."""
        for root in self.roots:
            shutil.rmtree(root / _entry_name(self._key(preparer)), ignore_errors=True)

    def entries(self) -> list["CacheEntry"]:
        """What was prepared from this bundle on this machine."""
        found = []
        for root in self.roots:
            for folder in sorted(root.glob("*-*-*")) if root.is_dir() else ():
                key = stamp_key(folder)
                if key is not None and [key.bundle, key.host] == self._made_for()[1:]:
                    size = sum(path.stat().st_size for path in folder.iterdir())
                    found.append(CacheEntry(folder, key.preparer, key.version, size))
        return found

    def recall(self, name: str) -> dict[str, Any] | None:
        """What `remember` kept under this name for this bundle on this machine."""
        for root in self.roots:
            record = read_json(root / f"{name}.json")
            if record is not None and record.get("made_for") == self._made_for():
                content = record.get("content")
                return content if isinstance(content, dict) else None
        return None

    def remember(self, name: str, content: Mapping[str, Any]) -> bool:
        """Keep a small JSON object; False where nothing can be written."""
        for root in self.roots:
            try:
                _make_root(root)
                write_json(
                    root / f"{name}.json", {"made_for": self._made_for(), "content": content}
                )
            except OSError:
                continue
            return True
        return False

    def _made_for(self) -> list[str | int]:
        return [FORMAT, self.bundle_digest, self.host_digest]

    def _key(self, preparer: Preparer) -> EntryKey:
        return EntryKey(
            FORMAT, self.bundle_digest, self.host_digest, preparer.name, preparer.version
        )

    def _make(self, root: Path, key: EntryKey, preparer: Preparer, progress: Progress) -> Path:
        """Raises OSError or PrepareError and leaves nothing behind."""
        _make_root(root)
        target = root / _entry_name(key)

        def waiting() -> None:
            progress.note("waiting for another process that prepares the same bundle")

        with locked(root / LOCK_NAME, LOCK_TIMEOUT_S, waiting) as alone:
            if is_good(target, key):
                return target
            if alone:
                _remove_stale(root, key)
            partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=root))
            try:
                preparer.prepare(partial, progress)
                write_stamp(partial, key)
                partial.chmod(0o755)
                _swap(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        if not is_good(target, key):
            raise OSError("the prepared files were changed while they were put in place")
        return target


def host_cache(folder: Path, *, user_folder: Path | None = None) -> HostCache:
    """The cache of the bundle in `folder`. `user_folder` stands for the user's cache folder.
    Raises BundleError when there is no readable bundle.json."""
    folder = folder.resolve()
    with open_folder(folder) as root:
        data = read_small(root, MANIFEST_NAME, MANIFEST_NAME, MAX_MANIFEST_BYTES)
    digest = hashlib.sha256(data).hexdigest()
    host = hashlib.sha256(instruction_set().encode()).hexdigest()
    user = user_folder or user_cache_folder()
    roots = [folder / FOLDER_NAME]
    if user is not None:
        roots.append(user / "trtllm-lite" / digest[:32])
    return HostCache(digest, host, tuple(roots))


def user_cache_folder() -> Path | None:
    """Where programs of this user keep what they can make again; None for a user without a home.

    Linux and others: https://specifications.freedesktop.org/basedir-spec/latest/ (a relative
    XDG_CACHE_HOME is to be ignored); macOS and Windows: their own conventions.
    """
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    given = Path(os.environ.get(variable, ""))
    if given.is_absolute() and sys.platform != "darwin":
        return given
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"


def _entry_name(key: EntryKey) -> str:
    text = "\0".join((str(key.format), key.bundle, key.host, key.preparer, key.version))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{key.preparer}-{key.host[:8]}-{digest[:16]}"


def _make_root(root: Path) -> None:
    """Only the last folders that are ours are made; a link in their place is not followed."""
    root.mkdir(parents=root.name != FOLDER_NAME, exist_ok=True)
    if root.is_symlink():
        raise OSError("is a symbolic link")


def _swap(partial: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)


def _remove_stale(root: Path, key: EntryKey) -> None:
    """Partial folders of killed processes, entries of a bundle that is no more, and older entries
    of this preparer. What other machines made for the same bundle stays. Needs the lock."""
    for path in root.iterdir():
        if path.is_symlink() or not path.is_dir():
            continue
        if path.name.startswith(_PARTIAL):
            shutil.rmtree(path, ignore_errors=True)
        elif _ENTRY.fullmatch(path.name):
            other = stamp_key(path)
            mine = other is not None and (other.preparer, other.host) == (key.preparer, key.host)
            if other is None or other.bundle != key.bundle or mine:
                shutil.rmtree(path, ignore_errors=True)
