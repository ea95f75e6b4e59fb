"""Bundles made to read or run what they must not: every one is refused, nothing outside is read.

Where a test puts a FIFO, opening it for reading would hang: the refusal itself is the proof that
it was not opened.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import BundleError

Edit = Callable[[Callable[[dict[str, Any]], None]], None]
PutFile = Callable[[str, bytes], None]
WEIGHTS = 2  # index of weights.bin in files

BAD_PATHS = {
    "": "is empty",
    "/etc/passwd": "absolute",
    "../secret.bin": "'..'",
    "a/../../secret.bin": "'..'",
    "./weights.bin": "'.'",
    "a//b": "an empty",
    "a\\b": "backslash",
    "..\\secret.bin": "backslash",
    "C:secret.bin": "drive letter",
    "C:/secret.bin": "drive letter",
    "a b": "portable",
    "-rf": "portable",
    "weights.bin ": "portable",
    "x" * 256: "portable",
    "a/" * 600 + "b": "portable",
    "*/_ORT_MEM_ADDR_/*": "portable",
    "wéights.bin": "portable",
}


def refusal(folder: Path, field: str) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were opened as files of the bundle, in order."""
    names: list[str] = []
    real = os.open

    def spy(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & os.O_DIRECTORY:
            names.append(os.fspath(path))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", spy)
    return names


# Paths in the manifest


@pytest.mark.parametrize("path", [*BAD_PATHS, "nul\0byte", "new\nline", "\ud800"])
def test_unsafe_file_paths(plain_bundle: Path, edit_manifest: Edit, path: str) -> None:
    edit_manifest(lambda document: document["files"][WEIGHTS].update(path=path))
    text = refusal(plain_bundle, "files[2].path")
    assert BAD_PATHS.get(path, "control character") in text


@pytest.mark.parametrize("path", BAD_PATHS)
@pytest.mark.parametrize("key", ["weights", "graph"])
def test_unsafe_graph_and_weight_names(
    plain_bundle: Path, edit_manifest: Edit, key: str, path: str
) -> None:
    def change(document: dict[str, Any]) -> None:
        if key == "weights":
            document["weights"] = path
        else:
            document["graphs"][1]["file"] = path

    edit_manifest(change)
    field = "weights" if key == "weights" else "graphs[1].file"
    assert BAD_PATHS[path] in refusal(plain_bundle, field)


def test_graphs_and_weights_lie_beside_each_other(plain_bundle: Path, edit_manifest: Edit) -> None:
    edit_manifest(lambda document: document.update(weights="sub/weights.bin"))
    assert "bare file name" in refusal(plain_bundle, "weights")


@pytest.mark.parametrize("name", ["Weights.BIN", "weights.bin", "bundle.json", "BUNDLE.json"])
def test_files_listed_twice(plain_bundle: Path, edit_manifest: Edit, name: str) -> None:
    entry = {"path": name, "size": 64, "sha256": "0" * 64}
    edit_manifest(lambda document: document["files"].append(entry))
    assert "listed twice" in refusal(plain_bundle, "files[7].path")


@pytest.mark.parametrize("key", ["tokenizer", "chat_template", "generation_config", "weights"])
def test_named_files_must_be_listed(plain_bundle: Path, edit_manifest: Edit, key: str) -> None:
    (plain_bundle / "other").write_text("there, but not listed")
    edit_manifest(lambda document: document.update({key: "other"}))
    assert "'other' is not in files" in refusal(plain_bundle, key)


def test_a_graph_in_another_format_is_refused(plain_bundle: Path, edit_manifest: Edit) -> None:
    def change(document: dict[str, Any]) -> None:
        document["graphs"][0]["file"] = document["files"][0]["path"] = "prefill.ort"

    (plain_bundle / "prefill.onnx").rename(plain_bundle / "prefill.ort")
    edit_manifest(change)
    assert ".onnx" in refusal(plain_bundle, "graphs[0].file")


def test_ort_format_under_an_onnx_name(plain_bundle: Path, put_file: PutFile) -> None:
    put_file("prefill.onnx", b"\x18\x00\x00\x00ORTM" + b"\0" * 64)
    assert "own format" in refusal(plain_bundle, "graphs[0].file")


# What lies at the paths


def replace_by(path: Path, kind: str, outside: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    outside.write_bytes(data)
    if kind == "symlink":
        path.symlink_to(outside)
    elif kind == "dangling symlink":
        path.symlink_to(outside / "nowhere")
    elif kind == "symlink inside":
        path.with_name("copy").write_bytes(data)
        path.symlink_to("copy")
    elif kind == "hard link":
        path.hardlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")


KINDS = {
    "symlink": "symbolic link",
    "dangling symlink": "symbolic link",
    "symlink inside": "symbolic link",
    "hard link": "hard link",
    "fifo": "not a regular file",
    "socket": "not a regular file",
    "folder": "not a regular file",
    "device": "symbolic link",
}


@pytest.mark.parametrize("name", ["prefill.onnx", "weights.bin", "tokenizer.json", "parity.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_of_the_folder(
    plain_bundle: Path, tmp_path: Path, reads: list[str], kind: str, name: str
) -> None:
    replace_by(plain_bundle / name, kind, tmp_path / "outside")
    index = {"prefill.onnx": 0, "weights.bin": 2, "tokenizer.json": 3, "parity.json": 6}[name]
    assert KINDS[kind] in refusal(plain_bundle, f"files[{index}].path")
    assert name not in reads


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_itself_is_a_regular_file(
    plain_bundle: Path, tmp_path: Path, reads: list[str], kind: str
) -> None:
    replace_by(plain_bundle / "bundle.json", kind, tmp_path / "outside")
    assert KINDS[kind] in refusal(plain_bundle, "bundle.json")
    assert reads == []


def test_a_real_device_is_not_read(plain_bundle: Path, reads: list[str]) -> None:
    (plain_bundle / "weights.bin").unlink()
    try:
        os.mknod(plain_bundle / "weights.bin", 0o020666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root can make a device")
    assert "not a regular file" in refusal(plain_bundle, "files[2].path")
    assert "weights.bin" not in reads


def test_a_symlinked_subfolder(plain_bundle: Path, tmp_path: Path, edit_manifest: Edit) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (plain_bundle / "tokenizer.json").rename(outside / "tokenizer.json")
    (plain_bundle / "sub").symlink_to(outside)

    def change(document: dict[str, Any]) -> None:
        document["files"][3]["path"] = document["tokenizer"] = "sub/tokenizer.json"

    edit_manifest(change)
    assert "symbolic link" in refusal(plain_bundle, "files[3].path")


def test_a_swap_between_the_passes_is_seen(
    plain_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO that takes the file's place after it was looked at, just before it is opened."""
    real, count = os.open, 0

    def swap(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        nonlocal count
        if path == "weights.bin" and (count := count + 1) == 2:
            (plain_bundle / "weights.bin").unlink()
            os.mkfifo(plain_bundle / "weights.bin")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap)
    assert "not a regular file" in refusal(plain_bundle, "files[2].path")
