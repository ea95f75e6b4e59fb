"""Every exception becomes one line and the right exit code."""

import errno
from importlib import import_module

import click
import pytest

from trtllm_lite.runtime.errors import (
    BundleError,
    MissingExtraError,
    RequestError,
    TrtllmLiteError,
    UsageError,
)
from trtllm_lite.tools.failures import describe, needs_extra

NO_SPACE = OSError(errno.ENOSPC, "No space left on device", "/data/x")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BundleError("files[2].sha256", "is\nwrong"), 1, "files[2].sha256: is wrong"),
        (UsageError("--dtype: got x"), 2, "--dtype: got x"),
        (RequestError("prompt", "is empty"), 2, "prompt: is empty"),
        (TrtllmLiteError("a\x1b[31mb"), 1, "a\\x1b[31mb"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.exceptions.Abort(), 130, "interrupted"),
        (click.UsageError("no"), 2, "no"),
        (
            NO_SPACE,
            1,
            "No space left on device: /data/x (free some space, or write elsewhere)",
        ),
        (FileNotFoundError(2, "No such file or directory", "x"), 1, "No such file or directory: x"),
        (MemoryError(), 1, "out of memory"),
        (
            KeyError("k"),
            1,
            "internal error: KeyError: 'k' (run again with --debug for the traceback)",
        ),
    ],
)
def test_a_failure_is_one_line_and_a_code(error: BaseException, code: int, message: str) -> None:
    failure = describe(error)
    assert (failure.message, failure.exit_code) == (message, code)


def test_a_long_message_is_cut() -> None:
    assert len(describe(TrtllmLiteError("x" * 10**6)).message) < 3000


def test_a_missing_package_names_its_extra() -> None:
    with (
        pytest.raises(MissingExtraError, match=r"no_such_package .*'trtllm-lite\[export\]'"),
        needs_extra("export"),
    ):
        import_module("no_such_package.part")


def test_a_missing_module_of_our_own_is_a_bug_not_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("export"):
        import_module("trtllm_lite.no_such_module")
