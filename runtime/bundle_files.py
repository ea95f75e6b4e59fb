"""The files of a bundle, opened without trusting them.

A listed file is opened component by component below the bundle's folder, never through a symbolic
link, and must be a regular file with one name. FIFOs and devices are recognised before they are
opened, so nothing blocks and nothing outside the folder is read. POSIX only.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import MANIFEST_NAME, FileEntry
from trtllm_lite.runtime.strict_json import shown

HashProgress = Callable[[str, int, int], None]
"""Called with (name of the file, bytes hashed so far over all files, bytes of all files)."""

PIECE_BYTES = 8 * 2**20
MAX_PATH_CHARS = 1024
_PART = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+-]{0,254}")
_DRIVE = re.compile(r"[A-Za-z]:")
_LFS_HEAD = b"version https://git-lfs"
_LFS_MAX_BYTES = 1024
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def path_problem(path: str) -> str | None:
    """Why `path` is not a safe relative path inside a bundle; None when it is one."""
    if not path:
        return "is empty"
    if path.startswith("/"):
        return f"{shown(path)} is an absolute path; only paths inside the bundle are allowed"
    if "\\" in path or _DRIVE.match(path):
        return f"{shown(path)} has a backslash or a drive letter; use forward slashes"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return f"{shown(path)} has an empty, '.' or '..' part; only paths inside the bundle"
    if len(path) > MAX_PATH_CHARS or not all(_PART.fullmatch(part) for part in parts):
        return f"{shown(path)} is not a portable path: letters, digits and _ . + - only"
    return None


def bare_name_problem(name: str) -> str | None:
    """Why `name` is not a bare file name (a safe path without a folder); None when it is one."""
    problem = path_problem(name)
    if problem is None and "/" in name:
        return f"{shown(name)} is in a sub-folder; it must be a bare file name"
    return problem


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """A descriptor of the bundle's folder. Raises BundleError with what to do instead."""
    try:
        fd = os.open(folder, _FOLDER_FLAGS)
    except (OSError, ValueError) as error:
        raise BundleError("bundle", _why_no_folder(folder, error)) from None
    try:
        yield fd
    finally:
        os.close(fd)


def _why_no_folder(folder: Path, error: Exception) -> str:
    name = shown(str(folder), 200)
    if isinstance(error, FileNotFoundError):
        return f"{name} does not exist; make one with `trtllm-lite export MODEL --output DIR`"
    if isinstance(error, NotADirectoryError):
        return f"{name} is not a folder; a bundle is the folder that holds {MANIFEST_NAME}"
    return f"{name} cannot be opened: {_reason(error)}"


@contextmanager
def open_inside(root: int, path: str, field: str) -> Iterator[int]:
    """A descriptor of the regular file `path` below the folder descriptor `root`.

    Raises BundleError(field) for an unsafe path, a missing file, a link of either kind, and
    anything that is not a regular file.
    """
    if problem := path_problem(path):
        raise BundleError(field, problem)
    try:
        fd = _open_parts(root, path, field)
    except OSError as error:
        raise BundleError(field, f"{shown(path)} {_reason(error)}") from None
    try:
        _refuse_odd(os.fstat(fd), path, field)
        yield fd
    finally:
        os.close(fd)


def _open_parts(root: int, path: str, field: str) -> int:
    *folders, name = path.split("/")
    at = os.dup(root)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        _refuse_odd(os.stat(name, dir_fd=at, follow_symlinks=False), path, field)
        return os.open(name, _FILE_FLAGS, dir_fd=at)
    finally:
        os.close(at)


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, NotADirectoryError) or getattr(error, "errno", None) == errno.ELOOP:
        return "is reached through a symbolic link or a file; put the file itself there"
    return str(getattr(error, "strerror", None) or type(error).__name__)


def _refuse_odd(info: os.stat_result, path: str, field: str) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise BundleError(field, f"{shown(path)} is a symbolic link; put the file itself there")
    if not stat.S_ISREG(info.st_mode):
        raise BundleError(field, f"{shown(path)} is not a regular file")
    if info.st_nlink > 1:
        raise BundleError(field, f"{shown(path)} is a hard link; put a copy of the file there")


def read_small(root: int, path: str, field: str, limit: int) -> bytes:
    """All bytes of a file of at most `limit` bytes."""
    with open_inside(root, path, field) as fd:
        size = os.fstat(fd).st_size
        if size > limit:
            raise BundleError(field, f"{shown(path)} has {size} bytes; at most {limit} are read")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    if data.startswith(_LFS_HEAD):
        raise BundleError(field, _lfs_text(path))
    return data


def check_sizes(root: int, files: Sequence[FileEntry]) -> None:
    """Every listed file is there, safe and of its listed size, and no git-lfs pointer."""
    for index, entry in enumerate(files):
        with open_inside(root, entry.path, f"files[{index}].path") as fd:
            _check_size(fd, entry, index)


def check_hashes(
    root: int, files: Sequence[FileEntry], progress: HashProgress | None = None
) -> None:
    """Every listed file has its listed sha256. Reads all of them, in pieces of 8 MB."""
    total, done = sum(entry.size for entry in files), 0
    for index, entry in enumerate(files):

        def tell(count: int, name: str = entry.path, before: int = done) -> None:
            if progress is not None:
                progress(name, before + count, total)

        with open_inside(root, entry.path, f"files[{index}].path") as fd:
            _check_size(fd, entry, index)
            digest = _sha256(fd, tell)
        if digest != entry.sha256:
            raise BundleError(
                f"files[{index}].sha256",
                f"{shown(entry.path)} is damaged or was changed: it has {digest}, "
                f"the manifest {entry.sha256}; copy the bundle again",
            )
        done += entry.size


def describe_file(folder: Path, path: str, progress: HashProgress | None = None) -> FileEntry:
    """The entry of a file that is to be listed. Reads all of it; same refusals as on opening."""
    with open_folder(folder) as root, open_inside(root, path, "files") as fd:
        size = os.fstat(fd).st_size
        digest = _sha256(fd, lambda done: progress(path, done, size) if progress else None)
        return FileEntry(path=path, size=size, sha256=digest)


def _check_size(fd: int, entry: FileEntry, index: int) -> None:
    size = os.fstat(fd).st_size
    if size <= _LFS_MAX_BYTES and os.pread(fd, len(_LFS_HEAD), 0) == _LFS_HEAD:
        raise BundleError(f"files[{index}].path", _lfs_text(entry.path))
    if size != entry.size:
        raise BundleError(
            f"files[{index}].size",
            f"{shown(entry.path)} has {size} bytes, the manifest says {entry.size}; "
            "copy the bundle again",
        )


def _lfs_text(path: str) -> str:
    return f"{shown(path)} looks like a git-lfs pointer, not the file: run `git lfs pull`"


def _sha256(fd: int, tell: Callable[[int], None]) -> str:
    digest, piece, done = hashlib.sha256(), bytearray(PIECE_BYTES), 0
    with open(fd, "rb", buffering=0, closefd=False) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
            done += count
            tell(done)
    return digest.hexdigest()
