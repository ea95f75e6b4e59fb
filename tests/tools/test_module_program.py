"""Developers' tools: one line for an error, and an end that cleans up."""

import os
import signal
from collections.abc import Iterator

import click
import pytest

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.module_program import run_module


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", ["tool"])
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def code_of(command: click.Command) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        run_module(command, "trtllm_lite.tools.some_tool")
    return ended.value.code


def test_an_error_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def fails() -> None:
        raise UsageError("no such thing; name another")

    assert code_of(fails) == UsageError("").exit_code != 0
    assert capsys.readouterr().err == "error: no such thing; name another\n"


def test_a_wrong_option_is_told_with_the_modules_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["tool", "--what"])
    assert code_of(click.command()(lambda: None)) == 2
    assert "Usage: python -m trtllm_lite.tools.some_tool" in capsys.readouterr().err


def test_being_told_to_stop_leaves_nothing_behind() -> None:
    cleaned = []

    @click.command()
    def waits() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 5)
        finally:
            cleaned.append(True)

    assert code_of(waits) == 143
    assert cleaned


def test_a_tool_that_ends_well() -> None:
    assert code_of(click.command()(lambda: None)) == 0
