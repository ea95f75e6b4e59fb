"""From an exception to one line and an exit code.

0 done; 1 failed; 2 a wrong option, argument or request; 130 interrupted.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import click

from trtllm_lite.runtime.errors import MissingExtraError, TrtllmLiteError
from trtllm_lite.tools.console import printable

FAILED = 1
INTERRUPTED = 130
MAX_MESSAGE = 2000


@dataclass(frozen=True)
class Failure:
    """What the user reads, on one line, and what the shell gets."""

    message: str
    exit_code: int


def describe(error: BaseException) -> Failure:
    """The failure that `error` means to the user."""
    if isinstance(error, click.exceptions.Abort | KeyboardInterrupt):
        return Failure("interrupted", INTERRUPTED)
    if isinstance(error, click.ClickException):
        return Failure(_one_line(_usage_message(error)), error.exit_code)
    if isinstance(error, TrtllmLiteError):
        return Failure(_one_line(str(error)), error.exit_code)
    if isinstance(error, OSError):
        return Failure(_one_line(_system_message(error)), FAILED)
    if isinstance(error, MemoryError):
        return Failure(_one_line(f"out of memory: {error}".rstrip(": ")), FAILED)
    text = f"internal error: {type(error).__name__}: {error}"
    return Failure(f"{_one_line(text)} (run again with --debug for the traceback)", FAILED)


def _usage_message(error: click.ClickException) -> str:
    message = error.format_message().strip()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message} (see '{error.ctx.command_path} --help')"
    return message


def _system_message(error: OSError) -> str:
    message = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        message += f": {os.fsdecode(error.filename)}"
    if error.errno == errno.ENOSPC:
        message += " (free some space, or write elsewhere)"
    return message


def _one_line(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Imports inside say which extra brings the package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "trtllm_lite"):
            raise
        raise MissingExtraError(package, extra) from error


def drop_output(stream: TextIO | None = None) -> None:
    """The reader of `stream` (stdout) has gone: let what is still written to it, as by the
    interpreter's last flush, go nowhere."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (stream or sys.stdout).fileno())
        os.close(null)
    except (OSError, ValueError):
        return
