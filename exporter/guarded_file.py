"""Opening a file of a checkpoint that may not be what it seems. Nothing is read beyond a prefix."""

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_lite.runtime.errors import CheckpointError

_LFS_HEAD = b"version https://git-lfs"
# O_NONBLOCK: opening a FIFO for reading would wait for a writer.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextmanager
def guarded(path: Path) -> Iterator[tuple[int, int]]:
    """A descriptor of a regular file and its size in bytes.

    Symbolic links are followed: the cache of huggingface-hub is made of them. Raises
    CheckpointError for a missing file, for anything but a regular file, and for a git-lfs pointer.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path.name}: not a regular file")
        fd = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{path.name}: cannot be opened: {why}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{path.name}: not a regular file")
        if os.pread(fd, len(_LFS_HEAD), 0) == _LFS_HEAD:
            text = "looks like a git-lfs pointer, not the file: run `git lfs pull`"
            raise CheckpointError(f"{path.name}: {text}")
        yield fd, info.st_size
    finally:
        os.close(fd)


@contextmanager
def mapped(path: Path, least: int) -> Iterator[mmap.mmap]:
    """The bytes of a guarded file of at least `least` bytes, mapped read-only."""
    with guarded(path) as (fd, size):
        if size < least:
            raise CheckpointError(f"{path.name}: truncated: {size} bytes, at least {least} needed")
        with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:
            yield data
