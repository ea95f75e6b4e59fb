"""Opening good bundles, and telling what is wrong with honest but broken ones."""

import hashlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime import bundle_files
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.bundle_files import describe_file
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import FileEntry, Manifest
from trtllm_lite.runtime.manifest_io import write_manifest

Edit = Callable[[Callable[[dict[str, Any]], None]], None]


def refusal(folder: Path, field: str, *, check_hashes: bool = True) -> str:
    """The one line of the refusal, which must name `field`."""
    with pytest.raises(BundleError) as caught:
        open_bundle(folder, check_hashes=check_hashes)
    assert caught.value.field == field
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{field}: ")
    return text


def test_a_valid_bundle_opens(plain_bundle: Path, plain_manifest: Manifest) -> None:
    bundle = open_bundle(plain_bundle)
    assert bundle.manifest == plain_manifest
    assert bundle.graph_path("prefill") == plain_bundle / "prefill.onnx"
    assert bundle.graph_path("decode") == plain_bundle / "decode.onnx"
    assert bundle.path("parity.json").read_bytes() == b'{"passed": true}'


def test_only_listed_files_are_given_out(plain_bundle: Path) -> None:
    (plain_bundle / "notes.txt").write_text("not listed")
    bundle = open_bundle(plain_bundle)
    assert bundle.has("weights.bin")
    assert not bundle.has("notes.txt")
    for name in ("notes.txt", "../outside", "bundle.json"):
        with pytest.raises(BundleError, match="is not a file of the bundle"):
            bundle.path(name)


def test_unlisted_files_are_never_read(plain_bundle: Path, tmp_path: Path) -> None:
    (plain_bundle / "engines").mkdir()
    (plain_bundle / "engines" / "sm90.plan").write_bytes(b"plan")
    (plain_bundle / ".hidden").symlink_to(tmp_path)
    (plain_bundle / "unreadable").symlink_to(tmp_path / "nowhere")
    open_bundle(plain_bundle)


def test_a_listed_file_may_lie_in_a_subfolder(plain_bundle: Path, plain_manifest: Manifest) -> None:
    (plain_bundle / "text").mkdir()
    (plain_bundle / "tokenizer.json").rename(plain_bundle / "text" / "tokenizer.json")
    entry = describe_file(plain_bundle, "text/tokenizer.json")
    files = (*(f for f in plain_manifest.files if f.path != "tokenizer.json"), entry)
    write_manifest(plain_bundle, replace(plain_manifest, files=files, tokenizer=entry.path))
    assert open_bundle(plain_bundle).path(entry.path).read_bytes() == b"{}"


def test_describe_file_is_what_opening_compares(plain_bundle: Path) -> None:
    data = (plain_bundle / "weights.bin").read_bytes()
    expected = FileEntry("weights.bin", len(data), hashlib.sha256(data).hexdigest())
    assert describe_file(plain_bundle, "weights.bin") == expected


def test_a_link_to_the_folder_is_followed_once(plain_bundle: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(plain_bundle, newer)
    current = tmp_path / "current"
    current.symlink_to(plain_bundle)
    bundle = open_bundle(current)
    current.unlink()
    current.symlink_to(newer)
    assert bundle.path("weights.bin") == plain_bundle / "weights.bin"


def test_opening_in_several_threads_agrees(plain_bundle: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(open_bundle, [plain_bundle] * 8))
    assert all(bundle == opened[0] for bundle in opened)


def test_missing_folder(tmp_path: Path) -> None:
    text = refusal(tmp_path / "nothing", "bundle")
    assert "does not exist" in text
    assert "trtllm-lite export" in text


def test_a_file_is_not_a_bundle(plain_bundle: Path) -> None:
    assert "is not a folder" in refusal(plain_bundle / "bundle.json", "bundle")


def test_a_folder_without_manifest(tmp_path: Path) -> None:
    text = refusal(tmp_path, "bundle")
    assert "no bundle.json" in text
    assert "trtllm-lite export MODEL" in text


def test_a_checkpoint_must_be_exported_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    text = refusal(tmp_path, "bundle")
    assert "is a checkpoint" in text
    assert f"trtllm-lite export '{tmp_path}'" in text


@pytest.mark.parametrize(
    "name",
    [
        "prefill.onnx",
        "decode.onnx",
        "weights.bin",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "parity.json",
    ],
)
def test_a_missing_file_is_named(plain_bundle: Path, plain_manifest: Manifest, name: str) -> None:
    (plain_bundle / name).unlink()
    index = [f.path for f in plain_manifest.files].index(name)
    assert f"'{name}' is missing" in refusal(plain_bundle, f"files[{index}].path")


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("hashes", [True, False])
def test_size_off_by_one(plain_bundle: Path, change: int, hashes: bool) -> None:
    data = (plain_bundle / "weights.bin").read_bytes()
    (plain_bundle / "weights.bin").write_bytes((data + b"x")[: 64 + change])
    text = refusal(plain_bundle, "files[2].size", check_hashes=hashes)
    assert f"has {64 + change} bytes, the manifest says 64" in text


def test_one_flipped_bit(plain_bundle: Path) -> None:
    data = bytearray((plain_bundle / "weights.bin").read_bytes())
    data[63] ^= 1
    (plain_bundle / "weights.bin").write_bytes(data)
    text = refusal(plain_bundle, "files[2].sha256")
    assert hashlib.sha256(data).hexdigest() in text
    open_bundle(plain_bundle, check_hashes=False)


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("name", ["weights.bin", "prefill.onnx"])
def test_a_git_lfs_pointer_is_recognised(plain_bundle: Path, name: str, hashes: bool) -> None:
    pointer = f"version https://git-lfs.invalid/spec/v1\noid sha256:{'0' * 64}\nsize 64\n"
    (plain_bundle / name).write_text(pointer)
    index = {"prefill.onnx": 0, "weights.bin": 2}[name]
    assert "git lfs pull" in refusal(plain_bundle, f"files[{index}].path", check_hashes=hashes)


def test_a_listed_git_lfs_pointer_is_recognised(
    plain_bundle: Path, put_file: Callable[[str, bytes], None]
) -> None:
    put_file("decode.onnx", b"version https://git-lfs.invalid/spec/v1\nsize 64\n")
    assert "git lfs pull" in refusal(plain_bundle, "files[1].path")


def test_the_manifest_as_git_lfs_pointer(plain_bundle: Path) -> None:
    (plain_bundle / "bundle.json").write_text("version https://git-lfs.invalid/spec/v1\n")
    assert "git lfs pull" in refusal(plain_bundle, "bundle.json")


def test_progress_counts_every_byte_once(
    plain_bundle: Path, plain_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_files, "PIECE_BYTES", 10)
    told: list[tuple[str, int, int]] = []
    open_bundle(plain_bundle, progress=lambda *args: told.append(args))
    total = sum(f.size for f in plain_manifest.files)
    done = [count for _, count, _ in told]
    assert done == sorted(set(done))
    assert done[-1] == total
    assert {of for _, _, of in told} == {total}
    assert [name for name, _, _ in told].count("weights.bin") == 7
    told.clear()
    open_bundle(plain_bundle, check_hashes=False, progress=lambda *args: told.append(args))
    assert told == []


def test_a_newer_minor_with_unknown_fields_opens(
    plain_bundle: Path, edit_manifest: Edit, plain_manifest: Manifest
) -> None:
    def change(document: dict[str, Any]) -> None:
        document["format_version"] = "1.7"
        document["added_later"] = {"deep": [{}]}
        document["graphs"][0]["inputs"][0]["added_later"] = 1
        document["files"][0]["added_later"] = None

    edit_manifest(change)
    assert open_bundle(plain_bundle).manifest == replace(plain_manifest, format_version="1.7")


def test_an_unknown_major_names_both_versions(plain_bundle: Path, edit_manifest: Edit) -> None:
    edit_manifest(lambda document: document.update(format_version="2.0", model=None))
    text = refusal(plain_bundle, "format_version")
    assert "version 2.0" in text
    assert "1.1" in text
