"""An entry is good while it holds exactly what its stamp says."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_lite.runtime import cache_entry
from trtllm_lite.runtime.cache_entry import (
    STAMP_NAME,
    EntryKey,
    is_good,
    read_json,
    stamp_key,
    write_json,
    write_stamp,
)
from trtllm_lite.runtime.file_identity import sha256_of

KEY = EntryKey(1, "bundle", "host", "packer", "2")


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    folder = tmp_path / "entry"
    folder.mkdir()
    (folder / "a.data").write_bytes(b"aaaa")
    (folder / "b.onnx").write_bytes(b"bb")
    write_stamp(folder, KEY)
    return folder


def replaced_by_a_link(folder: Path) -> None:
    moved = (folder / "b.onnx").rename(folder.parent / "b")
    (folder / "b.onnx").symlink_to(moved)


def rewritten(path: Path, data: bytes) -> None:
    time.sleep(0.03)  # file times advance in ticks
    path.write_bytes(data)


def test_what_was_stamped_is_good_and_says_what_it_is(entry: Path) -> None:
    assert is_good(entry, KEY)
    assert stamp_key(entry) == KEY


@pytest.mark.parametrize(
    "key",
    [
        replace(KEY, format=2),
        replace(KEY, bundle="other"),
        replace(KEY, host="other"),
        replace(KEY, preparer="other"),
        replace(KEY, version="other"),
    ],
)
def test_another_key_is_not_good(entry: Path, key: EntryKey) -> None:
    assert not is_good(entry, key)


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: rewritten(f / "a.data", b"aaab"),
        lambda f: rewritten(f / "a.data", b"aaa"),
        lambda f: (f / "b.onnx").unlink(),
        lambda f: (f / "c").write_bytes(b""),
        lambda f: (f / STAMP_NAME).write_text("{"),
        lambda f: (f / STAMP_NAME).write_text("[]"),
        lambda f: (f / STAMP_NAME).unlink(),
        lambda f: (
            (f / "b.onnx").rename(f.parent / "b") and (f / "b.onnx").symlink_to(f.parent / "b")
        ),
    ],
)
def test_damage_of_any_kind_is_not_good(entry: Path, damage: Callable[[Path], object]) -> None:
    damage(entry)
    assert not is_good(entry, KEY)


def test_a_copy_is_hashed_once_and_good(
    entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(entry, copy)
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(cache_entry, "sha256_of", counted)
    assert is_good(copy, KEY)
    assert is_good(copy, KEY)
    assert sorted(hashed) == ["a.data", "b.onnx"]


def test_an_entry_without_files_cannot_be_stamped(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no file"):
        write_stamp(tmp_path, KEY)


def test_json_is_replaced_at_once_and_read_with_care(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    for text in ("", "[1]", "{", "[" * 100_000):
        path.write_text(text)
        assert read_json(path) is None
    path.write_text(json.dumps({"a": "x" * cache_entry.MAX_STAMP_BYTES}))
    assert read_json(path) is None
    assert read_json(tmp_path / "missing.json") is None
