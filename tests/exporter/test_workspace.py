"""All or nothing: what is at the output after every way an export can end."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_lite.exporter.workspace import check_space, workspace
from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.runtime.manifest import MANIFEST_NAME


def bundle(folder: Path, text: str = "old") -> Path:
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_text(text)
    (folder / "weights.bin").write_bytes(b"weights of the " + text.encode())
    return folder


def make(output: Path, *, overwrite: bool = False, error: BaseException | None = None) -> None:
    """An export of two files; `error` strikes between them."""
    with workspace(output, overwrite=overwrite) as folder:
        (folder / "weights.bin").write_bytes(b"weights of the new")
        if error is not None:
            raise error
        (folder / MANIFEST_NAME).write_text("new")


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


NEW = {MANIFEST_NAME: b"new", "weights.bin": b"weights of the new"}
OLD = {MANIFEST_NAME: b"old", "weights.bin": b"weights of the old"}
ERRORS = [
    ValueError("a bug"),
    KeyboardInterrupt(),
    SystemExit(1),
    OSError(errno.ENOSPC, "No space left on device"),
]


@pytest.fixture(scope="module")
def dead_pid() -> int:
    """The id of a process that has ended and been waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_success_leaves_the_bundle_alone(tmp_path: Path) -> None:
    make(tmp_path / "out")
    assert files(tmp_path / "out") == NEW
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_nothing_is_at_the_output_while_work_goes_on(tmp_path: Path) -> None:
    with workspace(tmp_path / "out", overwrite=False) as folder:
        assert not (tmp_path / "out").exists()
        assert folder.parent == tmp_path
        assert folder.name.startswith(".")
        (folder / MANIFEST_NAME).write_text("new")


def test_parents_are_made(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b" / "out")
    assert files(tmp_path / "a" / "b" / "out") == NEW


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_any_exception_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        make(tmp_path / "out", error=error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_any_exception_leaves_the_old_bundle(tmp_path: Path, error: BaseException) -> None:
    bundle(tmp_path / "out")
    with pytest.raises(type(error)):
        make(tmp_path / "out", overwrite=True, error=error)
    assert files(tmp_path / "out") == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_overwrite_replaces_the_whole_folder(tmp_path: Path) -> None:
    (bundle(tmp_path / "out") / "stale.onnx").write_text("of the old one")
    make(tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == NEW
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_bundle_is_not_replaced_unasked(tmp_path: Path) -> None:
    bundle(tmp_path / "out")
    with pytest.raises(UsageError, match="--overwrite"):
        make(tmp_path / "out")
    assert files(tmp_path / "out") == OLD


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_folder_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="holds other files"):
        make(tmp_path / "out", overwrite=overwrite)
    assert files(tmp_path / "out") == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UsageError, match="is a file; give a folder"):
        make(tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "a file"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out")
    assert files(tmp_path / "out") == NEW
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--output: cannot write in"):
        make(tmp_path / "file" / "out")


def test_a_link_to_a_bundle_is_followed(tmp_path: Path) -> None:
    bundle(tmp_path / "disk" / "real")
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    make(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").is_symlink()
    assert files(tmp_path / "disk" / "real") == NEW
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["real"]


# What killed exports leave behind


def test_what_a_dead_process_left_is_removed(tmp_path: Path, dead_pid: int) -> None:
    bundle(tmp_path / f".out.partial-{dead_pid}")
    make(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_live_process_writes_is_kept(tmp_path: Path) -> None:
    other = bundle(tmp_path / f".out.partial-{os.getppid()}")
    make(tmp_path / "out")
    assert files(other) == OLD


def test_folders_of_other_outputs_are_kept(tmp_path: Path, dead_pid: int) -> None:
    others = [f".out2.partial-{dead_pid}", ".out.partial-x", f".outx.partial-{dead_pid}"]
    for name in others:
        bundle(tmp_path / name)
    make(tmp_path / "out")
    assert all((tmp_path / name).is_dir() for name in others)


def test_a_name_is_no_pattern(tmp_path: Path, dead_pid: int) -> None:
    other = bundle(tmp_path / f".out.partial-{dead_pid}")
    own = bundle(tmp_path / f".ou[t].partial-{dead_pid}")
    make(tmp_path / "ou[t]")
    assert other.is_dir()
    assert not own.exists()


def test_the_id_of_a_dead_process_may_come_back_as_ours(tmp_path: Path) -> None:
    """In a container, the process that was killed had the same id as the next one."""
    bundle(tmp_path / f".out.partial-{os.getpid()}")
    make(tmp_path / "out")
    assert files(tmp_path / "out") == NEW
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_bundle_that_was_moved_aside_comes_back(tmp_path: Path, dead_pid: int) -> None:
    """The process was killed between the two renames."""
    bundle(tmp_path / f".out.replaced-{dead_pid}")
    bundle(tmp_path / f".out.partial-{dead_pid}", "half")
    with pytest.raises(UsageError, match="is a bundle already"):
        make(tmp_path / "out")
    assert files(tmp_path / "out") == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_replaced_bundle_is_removed_where_there_is_a_new_one(
    tmp_path: Path, dead_pid: int
) -> None:
    bundle(tmp_path / "out")
    bundle(tmp_path / f".out.replaced-{dead_pid}", "older")
    make(tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == NEW
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# Renames that fail

Rename = Callable[[Path, Path], Path]


def failing_rename(monkeypatch: pytest.MonkeyPatch, nth: int, error: BaseException) -> None:
    """Let the nth rename raise instead of doing anything."""
    original: Rename = Path.rename
    calls: list[Path] = []

    def rename(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == nth:
            raise error
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("error", [OSError(errno.EACCES, "denied"), KeyboardInterrupt()])
def test_a_failed_rename_restores_the_old_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, error: BaseException
) -> None:
    bundle(tmp_path / "out")
    failing_rename(monkeypatch, nth, error)
    with pytest.raises(type(error)):
        make(tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_interrupt_right_after_the_first_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Rename = Path.rename

    def rename(self: Path, target: Path) -> Path:
        result = original(self, target)
        if self.name == "out":
            raise KeyboardInterrupt
        return result

    bundle(tmp_path / "out")
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_old_bundle_survives_where_it_cannot_be_moved_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Rename = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if target.name == "out":
            raise OSError(errno.EIO, "the disk is gone")
        return original(self, target)

    bundle(tmp_path / "out")
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="the disk is gone"):
        make(tmp_path / "out", overwrite=True)
    assert files(tmp_path / f".out.replaced-{os.getpid()}") == OLD


# Room on the disk


def test_space_is_checked_before_writing(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(TrtllmLiteError, match=r"the bundle needs 1000000000\.0 GB") as caught:
        check_space(tmp_path, 10**18)
    assert "choose another --output" in str(caught.value)
