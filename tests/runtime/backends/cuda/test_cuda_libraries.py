"""Libraries of CUDA: loaded from where pip puts them, and named when missing."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.runtime.backends.cuda_libraries import (
    PROVIDER,
    SHARED,
    missing_cuda_library,
    preload_cuda_libraries,
)


def test_what_preloading_prints_goes_to_the_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def preload(**given: Any) -> None:
        asked.append(given)
        sys.stdout.write("Failed to load\nlibcudart")

    caplog.set_level(logging.INFO)
    preload_cuda_libraries(SimpleNamespace(preload_dlls=preload))
    assert asked == [{"directory": ""}]
    assert capsys.readouterr().out == ""
    assert [r.getMessage() for r in caplog.records] == ["CUDA libraries: Failed to load libcudart"]


def test_preloading_that_fails_or_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    def preload(**_: Any) -> None:
        raise RuntimeError("The directory does not exist!")

    caplog.set_level(logging.INFO)
    preload_cuda_libraries(SimpleNamespace())
    assert caplog.records == []
    preload_cuda_libraries(SimpleNamespace(preload_dlls=preload))
    assert "does not exist" in caplog.records[0].getMessage()


@pytest.fixture
def package(tmp_path: Path) -> Any:
    """A stand-in for the installed package whose provider links to a library of CUDA."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "capi").mkdir()
    source = tmp_path / "x.c"

    def library(name: str, text: str, *more: str) -> Path:
        source.write_text(text)
        path = tmp_path / "capi" / name
        made = [compiler, "-shared", "-fPIC", "-o", str(path), str(source), *more]
        subprocess.run(made, check=True)
        return path

    library(SHARED, "int host_of_the_provider(void) { return 1; }")
    cuda = library("libcudart_of_tests.so.13", "int cuda(void) { return 1; }")
    text = "int host_of_the_provider(void); int use(void) { return host_of_the_provider(); }"
    library(PROVIDER, text, "-Wl,--no-as-needed", f"-L{cuda.parent}", f"-l:{cuda.name}")
    return SimpleNamespace(__file__=str(tmp_path / "__init__.py"), cuda=cuda)


def test_a_library_that_is_missing_is_named(package: Any) -> None:
    assert missing_cuda_library(package).startswith("libcudart_of_tests.so.13: cannot open")


def test_a_package_without_the_provider(tmp_path: Path) -> None:
    said = missing_cuda_library(SimpleNamespace(__file__=str(tmp_path / "__init__.py")))
    assert SHARED in said
