"""What reaches the terminal: control codes only where allowed, tables that are never cut."""

import io
import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.tools.console import (
    Console,
    Settings,
    Table,
    error_line,
    format_bytes,
    format_count,
    format_seconds,
    plain_table,
    printable,
    styles_on,
    terminal_safe,
)


@dataclass
class Terminal(io.StringIO):
    """A stream that says whether it is a terminal."""

    tty: bool

    def isatty(self) -> bool:
        return self.tty


@given(st.text())
def test_printable_text_is_one_line_without_control_characters(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert shown.isprintable() or not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)


def test_terminal_text_keeps_lines_but_no_escapes() -> None:
    assert terminal_safe("a\n\tb\x1b[31m\u202e\u2028") == "a\n\tb\\x1b[31m\\u202e\\u2028"


@given(st.text(alphabet="aé漢字😀 \n"))
def test_ordinary_text_goes_to_a_terminal_as_it_is(text: str) -> None:
    assert terminal_safe(text) == text


@pytest.mark.parametrize(
    ("tty", "environ", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": ""}, False),
    ],
)
def test_styles_need_a_terminal_or_force(
    tty: bool, environ: dict[str, str], expected: bool
) -> None:
    assert styles_on(Terminal(tty), environ) is expected


def test_a_plain_table_is_aligned_and_whole() -> None:
    long = "x" * 200
    table = Table(
        "Files", ("file", "size"), (("a", "1"), (long, "1000"), ("漢", "5")), frozenset({1})
    )
    title, *lines = plain_table(table).split("\n")
    assert title == "Files"
    assert long in lines[2]
    ends = {len(line) + line.count("漢") for line in lines}
    assert len(ends) == 1


def test_json_is_one_document_without_nan(capsys: pytest.CaptureFixture[str]) -> None:
    Console(Settings()).json({"a": (1.5, float("-inf")), "b": {"c": float("nan")}, "漢": None})
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": [1.5, None], "b": {"c": None}, "漢": None}
    assert "漢" in text


def test_quiet_leaves_out_information_only(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(Settings(quiet=True))
    console.info("told")
    console.warn("warned")
    console.error("failed\nbadly")
    captured = capsys.readouterr()
    assert captured.err == "warning: warned\nerror: failed\\nbadly\n"


def test_pipes_get_exact_text(capsys: pytest.CaptureFixture[str]) -> None:
    Console(Settings()).stream("a\x1b[31m")
    assert capsys.readouterr().out == "a\x1b[31m"


def test_colours_follow_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("T", ("a",), (("[bold]x",),))
    console = Console(Settings())
    console.table(table)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[31m" in error_line(Settings(), "x")
    console.table(table)
    drawn = capsys.readouterr().out
    assert "\x1b" in drawn
    assert "[bold]x" in drawn
    monkeypatch.setenv("NO_COLOR", "1")
    assert error_line(Settings(), "x") == "error: x\n"


def test_all_of_stderr_is_events_where_progress_is_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(Settings(progress="json"))
    console.info("told", dim=True)
    console.warn("warned")
    console.error("failed")
    assert [json.loads(line) for line in capsys.readouterr().err.splitlines()] == [
        {"event": "note", "text": "told"},
        {"event": "warning", "message": "warned"},
        {"event": "error", "message": "failed"},
    ]


@given(st.integers(0, 2**60))
def test_sizes_stay_within_rounding(count: int) -> None:
    number, unit = format_bytes(count).split()
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    assert abs(float(number) * scale - count) <= 0.051 * scale
    assert float(number) <= 1024 or unit == "TiB"


def test_counts() -> None:
    counts = (0, 999, 1000, 134_515_008, 8_030_261_248)
    assert [format_count(n) for n in counts] == ["0", "999", "1.0k", "134.5M", "8.0B"]


def test_seconds() -> None:
    assert [format_seconds(x) for x in (None, 0.0123, 1.239)] == ["-", "12.3 ms", "1.24 s"]
