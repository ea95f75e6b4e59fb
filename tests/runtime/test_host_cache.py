"""The host cache: made once, all or nothing, never trusted further than its stamp, never needed."""

import errno
import multiprocessing
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_lite.runtime import host_cache as module
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.host_cache import (
    FOLDER_NAME,
    HostCache,
    PrepareError,
    Preparer,
    host_cache,
    user_cache_folder,
)
from trtllm_lite.runtime.progress import NoProgress, Progress


class Notes(NoProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


class Recipe:
    """Writes one file and counts how often."""

    def __init__(self, data: bytes = b"packed") -> None:
        self.data = data
        self.calls = 0

    def __call__(self, folder: Path, progress: Progress) -> None:
        self.calls += 1
        assert not list(folder.iterdir())
        (folder / "weights.data").write_bytes(self.data)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return tmp_path / "user"


@pytest.fixture
def cache(plain_bundle: Path, user: Path) -> HostCache:
    return host_cache(plain_bundle, user_folder=user)


def unwritable(folder: Path) -> None:
    """Root writes everywhere, so a file stands where the cache folder would."""
    (folder / FOLDER_NAME).write_text("in the way")


def folders(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir())


def test_files_are_made_once_beside_the_bundle(plain_bundle: Path, cache: HostCache) -> None:
    recipe = Recipe()
    first = cache.prepared(Preparer("packer", "1", recipe))
    assert first is not None
    assert first.parent == plain_bundle.resolve() / FOLDER_NAME
    assert (first / "weights.data").read_bytes() == b"packed"
    again = host_cache(plain_bundle).prepared(Preparer("packer", "1", recipe))
    assert (again, recipe.calls) == (first, 1)
    open_bundle(plain_bundle)


def test_where_the_bundle_cannot_be_written_the_users_folder_is_used(
    plain_bundle: Path, cache: HostCache, user: Path
) -> None:
    unwritable(plain_bundle)
    recipe = Recipe()
    for _ in range(2):
        made = cache.prepared(Preparer("packer", "1", recipe))
        assert made is not None
        assert made.parent == user / "trtllm-lite" / cache.bundle_digest[:32]
    assert recipe.calls == 1


def test_nowhere_to_write_is_one_note_and_no_cache(
    plain_bundle: Path, cache: HostCache, user: Path
) -> None:
    unwritable(plain_bundle)
    user.write_text("in the way too")
    notes = Notes()
    assert cache.prepared(Preparer("packer", "1", Recipe()), notes) is None
    assert len(notes.texts) == 1
    assert "without the host cache (packer)" in notes.texts[0]
    assert not cache.remember("x", {"a": 1})


def test_a_link_in_the_place_of_the_cache_is_not_followed(
    plain_bundle: Path, cache: HostCache, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (plain_bundle / FOLDER_NAME).symlink_to(elsewhere)
    made = cache.prepared(Preparer("packer", "1", Recipe()))
    assert made is not None
    assert made.parent == cache.roots[1]
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), PrepareError("no such operator")]
)
def test_a_preparer_that_fails_leaves_nothing(
    plain_bundle: Path, cache: HostCache, error: Exception
) -> None:
    def fails(folder: Path, progress: Progress) -> None:
        (folder / "half").write_bytes(b"half")
        raise error

    notes = Notes()
    assert cache.prepared(Preparer("packer", "1", fails), notes) is None
    assert str(getattr(error, "strerror", None) or error) in notes.texts[0]
    for root in cache.roots:
        assert not root.exists() or folders(root) == []


def test_a_fault_in_a_preparer_is_raised_and_leaves_nothing(cache: HostCache) -> None:
    def faulty(folder: Path, progress: Progress) -> None:
        (folder / "half").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.prepared(Preparer("packer", "1", faulty))
    assert folders(cache.roots[0]) == []


def edited(folder: Path) -> None:
    (folder / "weights.data").write_bytes(b"longer than before")


@pytest.mark.parametrize(
    "damage", [edited, shutil.rmtree, lambda f: (f / "foreign").write_bytes(b"x")]
)
def test_what_does_not_fit_its_stamp_is_made_again(
    cache: HostCache, damage: Callable[[Path], object]
) -> None:
    recipe = Recipe()
    made = cache.prepared(Preparer("packer", "1", recipe))
    assert made is not None
    damage(made)
    assert cache.prepared(Preparer("packer", "1", recipe)) == made
    assert recipe.calls == 2
    assert sorted(p.name for p in made.iterdir()) == ["stamp.json", "weights.data"]


def test_discarded_files_are_made_again(cache: HostCache) -> None:
    recipe = Recipe()
    preparer = Preparer("packer", "1", recipe)
    cache.prepared(preparer)
    cache.discard(preparer)
    assert cache.prepared(preparer) is not None
    assert recipe.calls == 2


def other(cache: HostCache, bundle: str | None = None, host: str | None = None) -> HostCache:
    return HostCache(bundle or cache.bundle_digest, host or cache.host_digest, cache.roots)


def test_a_new_entry_replaces_what_is_stale_and_nothing_else(cache: HostCache) -> None:
    root = cache.roots[0]
    stale = [
        other(cache, bundle="0" * 64).prepared(Preparer("packer", "1", Recipe())),
        other(cache, bundle="0" * 64).prepared(Preparer("native", "1", Recipe())),
        cache.prepared(Preparer("packer", "1", Recipe())),
    ]
    kept = [
        other(cache, host="f" * 64).prepared(Preparer("packer", "1", Recipe())),
        cache.prepared(Preparer("native", "1", Recipe())),
    ]
    (root / ".partial-of-a-killed-process").mkdir()
    (root / "someone-elses").mkdir()
    new = cache.prepared(Preparer("packer", "2", Recipe()))
    names = {p.name for p in (*kept, new) if p is not None} | {"someone-elses"}
    assert set(folders(root)) == names
    assert not any(p is not None and p.exists() for p in stale)


def test_the_key_is_the_bundle_the_machine_and_the_preparer(
    plain_bundle: Path, cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "instruction_set", lambda: "x86_64 avx2")
    here = host_cache(plain_bundle)
    assert here.host_digest != cache.host_digest
    manifest = plain_bundle / "bundle.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    assert host_cache(plain_bundle).bundle_digest != here.bundle_digest


def prepare_slowly(bundle: Path, log: Path) -> None:
    def prepare(folder: Path, progress: Progress) -> None:
        with log.open("a") as file:
            file.write("made\n")
        (folder / "weights.data").write_bytes(b"x" * 2**20)

    assert host_cache(bundle).prepared(Preparer("packer", "1", prepare)) is not None


def test_processes_that_start_together_make_it_once(plain_bundle: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    workers = [context.Process(target=prepare_slowly, args=(plain_bundle, log)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "made\n"


def test_what_is_remembered_is_of_this_bundle_and_machine(cache: HostCache) -> None:
    assert cache.recall("tuning") is None
    assert cache.remember("tuning", {"threads": 3})
    assert cache.recall("tuning") == {"threads": 3}
    assert cache.recall("verified") is None
    assert other(cache, bundle="0" * 64).recall("tuning") is None
    assert other(cache, host="0" * 64).recall("tuning") is None
    (cache.roots[0] / "tuning.json").write_text("{")
    assert cache.recall("tuning") is None


def test_no_bundle_no_cache(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        host_cache(tmp_path)


def test_the_users_folder_follows_the_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache_folder() == tmp_path / "xdg"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache_folder() == tmp_path / ".cache"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_cache_folder() == tmp_path / "Library" / "Caches"

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert user_cache_folder() is None


def test_a_user_without_a_home_has_the_bundles_folder_only(
    plain_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "user_cache_folder", lambda: None)
    assert host_cache(plain_bundle).roots == (plain_bundle.resolve() / FOLDER_NAME,)
