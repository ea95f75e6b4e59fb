"""All or nothing: work in a sibling folder, rename it into place at the end.

An interrupt, an error or a full disk leaves no trace, and an old bundle stays as it was.
"""

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.runtime.manifest import MANIFEST_NAME


@contextmanager
def workspace(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder beside `output`. On a normal exit it becomes `output`; on any other it is
    removed. Raises UsageError when `output` may not be written."""
    output = output.resolve()
    _clean_up(output)
    check_output(output, overwrite=overwrite)
    partial = _sibling(output, "partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise UsageError(f"--output: cannot write in {output.parent}: {error.strerror}") from error
    try:
        yield partial
        _publish(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_space(folder: Path, needed: int) -> None:
    """Refuse before writing when the disk has less than `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise TrtllmLiteError(
            f"the bundle needs {needed / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free; "
            "choose another --output or a smaller --dtype"
        )


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise UsageError when `output` is there and may not be replaced."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError(f"--output: {output} is a file; give a folder")
    if any(output.iterdir()) and not (output / MANIFEST_NAME).is_file():
        raise UsageError(f"--output: {output} holds other files; give a new folder")
    if (output / MANIFEST_NAME).is_file() and not overwrite:
        raise UsageError(f"--output: {output} is a bundle already; add --overwrite to replace it")


def _publish(partial: Path, output: Path) -> None:
    """Swap folders by renames, so that `output` is never half of anything."""
    old = _sibling(output, "replaced")
    try:
        if output.exists():
            output.rename(old)
        partial.rename(output)
    except BaseException:
        if old.exists() and not output.exists():
            old.rename(output)
        raise
    finally:
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)


def _clean_up(output: Path) -> None:
    """After killed exports of the same bundle: put the old bundle back where one was killed
    between the two renames, and remove what they left behind."""
    for old in _left_behind(output, "replaced"):
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(output)
    for stale in _left_behind(output, "partial"):
        shutil.rmtree(stale, ignore_errors=True)


def _sibling(output: Path, kind: str) -> Path:
    return output.parent / f".{output.name}.{kind}-{os.getpid()}"


def _left_behind(output: Path, kind: str) -> Iterator[Path]:
    """Siblings of that kind whose process is dead, or has given its id to this one."""
    for path in output.parent.glob(f".{glob.escape(output.name)}.{kind}-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and (int(pid) == os.getpid() or not _alive(int(pid))):
            yield path


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
