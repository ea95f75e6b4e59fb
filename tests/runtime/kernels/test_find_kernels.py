"""Where there are no kernels, or foreign ones, the reason is said."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trtllm_lite.runtime import kernels
from trtllm_lite.runtime.kernels import find_kernels
from trtllm_lite.runtime.native_table import VERSION


@pytest.fixture(autouse=True)
def looked_for_anew() -> Iterator[None]:
    find_kernels.cache_clear()
    yield
    find_kernels.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of the package's."""
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_not_compiled() -> None:
    found = find_kernels()
    assert found.library is None
    assert found.reason == "they were not compiled; install g++ and reinstall the package"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_another_system(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert find_kernels().reason == f"there are none for {system} on {machine}"


def test_a_file_that_is_no_library(folder: Path) -> None:
    (folder / "trtllm_lite_kernels.native.so").write_bytes(b"not a library")
    found = find_kernels()
    assert found.library is None
    assert "trtllm_lite_kernels.native.so cannot be loaded" in found.reason


@pytest.mark.usefixtures("library")
def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_lite.runtime.kernels.VERSION", VERSION + 1)
    found = find_kernels()
    assert found.library is None
    assert f"has version {VERSION}; needed: {VERSION + 1}" in found.reason


def test_the_compiled_library(library: str) -> None:
    found = find_kernels()
    assert (str(found.library), found.reason) == (library, "")
    assert find_kernels() is found
