"""Progress on stderr, with a clock that the test turns."""

import json
import sys

import pytest

from trtllm_lite.runtime.progress import NoProgress, Progress
from trtllm_lite.tools.console import ProgressMode, Settings
from trtllm_lite.tools.progress import (
    JsonProgress,
    PlainProgress,
    RichProgress,
    amount,
    progress_shown,
)


class Log:
    """Collects what is written, and is the clock."""

    def __init__(self) -> None:
        self.text = ""
        self.now = 100.0

    def write(self, text: str) -> None:
        self.text += text

    def clock(self) -> float:
        return self.now


def test_plain_steps_are_a_line_each_with_seconds() -> None:
    log = Log()
    progress = PlainProgress(log.write, log.clock)
    progress.step("trace prefill")
    assert log.text == "trace prefill ... "
    log.now += 1.5
    progress.step("trace decode")
    log.now += 0.25
    progress.close()
    assert log.text == "trace prefill ... 1.5 s\ntrace decode ... 0.2 s\n"


def test_plain_lines_inside_a_step_come_at_most_every_two_seconds() -> None:
    log = Log()
    progress = PlainProgress(log.write, log.clock)
    progress.step("weights")
    for done in range(1, 41):
        log.now += 0.25
        progress.advance(done, 40, "tensors")
    progress.close()
    lines = log.text.splitlines()
    assert lines[0] == "weights ... "
    assert lines[1:6] == [
        f"  {p}% ({n} of 40 tensors)"
        for n, p in zip((8, 16, 24, 32, 40), (20, 40, 60, 80, 100), strict=True)
    ]
    assert lines[6:] == ["weights: 10.0 s"]


def test_plain_notes_have_a_line_of_their_own() -> None:
    log = Log()
    progress = PlainProgress(log.write, log.clock)
    progress.step("a")
    progress.note("one\x1b[2J")
    progress.close()
    progress.note("two")
    assert log.text == "a ... \n  one\\x1b[2J\na: 0.0 s\n  two\n"


def test_json_lines_are_events() -> None:
    log = Log()
    progress = JsonProgress(log.write, log.clock)
    progress.step("weights")
    for done in range(1, 11):
        log.now += 0.1
        progress.advance(done, 10, "bytes")
    progress.note("n")
    progress.close(failed=True)
    events = [json.loads(line) for line in log.text.splitlines()]
    assert events[0] == {"event": "step", "name": "weights"}
    amounts = [e["done"] for e in events if e["event"] == "advance"]
    assert amounts[0] == 1
    assert amounts[-1] == 10
    assert len(amounts) <= 4
    assert events[-2:] == [
        {"event": "note", "name": "weights", "text": "n"},
        {"event": "stopped", "name": "weights", "seconds": 1.0},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, 4, "tensors"), "25% (1 of 4 tensors)"),
        ((2048, 4096, "bytes"), "50% (2.0 KiB of 4.0 KiB)"),
        ((7, 0, "tokens"), "7 tokens"),
        ((2048, 0, "bytes"), "2.0 KiB"),
    ],
)
def test_amounts(given: tuple[int, int, str], expected: str) -> None:
    assert amount(*given) == expected


@pytest.mark.parametrize(
    ("mode", "quiet", "kind"),
    [
        ("auto", False, PlainProgress),
        ("auto", True, NoProgress),
        ("plain", True, PlainProgress),
        ("json", False, JsonProgress),
        ("none", False, NoProgress),
    ],
)
def test_the_mode_chooses(mode: ProgressMode, quiet: bool, kind: type[Progress]) -> None:
    with progress_shown(Settings(progress=mode, quiet=quiet)) as progress:
        assert isinstance(progress, kind)


def test_a_failing_step_says_that_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with progress_shown(Settings()) as progress:
            progress.step("write")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        work()
    captured = capsys.readouterr()
    assert captured.err.startswith("write ... stopped after")
    assert captured.out == ""


def test_a_terminal_gets_a_bar_and_a_line_for_each_finished_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_shown(Settings()) as progress:
        assert isinstance(progress, RichProgress)
        progress.step("trace [bold]x")
        progress.advance(1, 2, "nodes")
        progress.note("a note")
        progress.step("write")
    shown = capsys.readouterr().err
    assert "trace [bold]x: 0.0 s" in shown
    assert "a note" in shown
    assert "write: 0.0 s" in shown
