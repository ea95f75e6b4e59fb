"""Hashes are compared once for each state of the files, and again after any change."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from trtllm_lite.runtime import bundle as bundle_module
from trtllm_lite.runtime.bundle_files import HashProgress, check_hashes
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.host_cache import FOLDER_NAME, host_cache
from trtllm_lite.runtime.manifest import FileEntry
from trtllm_lite.runtime.verified_files import open_verified


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each full comparison."""
    calls: list[int] = []

    def counted(
        root: int, files: Sequence[FileEntry], progress: HashProgress | None = None
    ) -> None:
        calls.append(1)
        check_hashes(root, files, progress)

    monkeypatch.setattr(bundle_module, "check_hashes", counted)
    return calls


def settle() -> None:
    time.sleep(0.05)  # file times advance in ticks


def test_unchanged_files_are_hashed_once(plain_bundle: Path, hashed: list[int]) -> None:
    settle()
    for _ in range(3):
        opened = open_verified(plain_bundle, host_cache(plain_bundle))
        assert opened.folder == plain_bundle.resolve()
    assert len(hashed) == 1


@pytest.mark.parametrize("name", ["weights.bin", "tokenizer.json", "prefill.onnx"])
def test_a_change_of_any_file_is_found(plain_bundle: Path, hashed: list[int], name: str) -> None:
    settle()
    open_verified(plain_bundle, host_cache(plain_bundle))
    settle()
    path = plain_bundle / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(BundleError, match="sha256"):
            open_verified(plain_bundle, host_cache(plain_bundle))
    assert len(hashed) == 3


def test_a_missing_file_is_found_though_it_was_there(plain_bundle: Path) -> None:
    settle()
    open_verified(plain_bundle, host_cache(plain_bundle))
    (plain_bundle / "weights.bin").unlink()
    with pytest.raises(BundleError, match="is missing"):
        open_verified(plain_bundle, host_cache(plain_bundle))


def test_files_written_this_moment_are_hashed_again(plain_bundle: Path, hashed: list[int]) -> None:
    settle()
    cache = host_cache(plain_bundle)
    for name in ("parity.json", "parity.json"):
        path = plain_bundle / name
        path.write_bytes(path.read_bytes())
        open_verified(plain_bundle, cache)
    assert len(hashed) == 2


def test_without_a_cache_everything_is_read_every_time(
    plain_bundle: Path, hashed: list[int]
) -> None:
    settle()
    open_verified(plain_bundle, None)
    open_verified(plain_bundle, None)
    assert len(hashed) == 2
    assert not (plain_bundle / FOLDER_NAME).exists()
