"""Where the command line writes: results to stdout, everything else to stderr.

Control codes go out only to a terminal (or where FORCE_COLOR asks for them), colours not where
NO_COLOR is set. rich is imported when a table or a bar is really drawn on a terminal.
"""

import json
import math
import os
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TextIO

import click

ProgressMode = Literal["auto", "plain", "json", "none"]
PROGRESS_MODES: tuple[ProgressMode, ...] = ("auto", "plain", "json", "none")


@dataclass(frozen=True)
class Settings:
    """The common options: what to tell, and how."""

    debug: bool = False
    quiet: bool = False
    progress: ProgressMode = "auto"


@dataclass(frozen=True)
class Table:
    """Text cells under column names; `right` holds the indices of right-aligned columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()


def printable(text: str) -> str:
    """`text` on one line and without control characters, which could drive a terminal: each one
    is shown as its escape."""
    return "".join(c if not _is_control(c) else ascii(c)[1:-1] for c in text)


def terminal_safe(text: str) -> str:
    """Running text for a terminal: line breaks and tabs stay, other control characters show."""
    return "".join(c if c in "\n\t" or not _is_control(c) else ascii(c)[1:-1] for c in text)


def _is_control(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Zl", "Zp") or char in _BIDI


# Characters that reorder what stands around them (Unicode bidirectional overrides and isolates).
_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def styles_on(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `stream` may carry control codes at all."""
    if environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and environ.get("TERM") != "dumb"


def plain_table(table: Table) -> str:
    """The table as aligned text columns: nothing is cut, nothing wraps."""
    lines = [table.columns, *table.rows]
    widths = [max(_width(line[i]) for line in lines) for i in range(len(table.columns))]
    body = [_plain_row(line, widths, table.right) for line in lines]
    return "\n".join([table.title, *body] if table.title else body)


def _plain_row(cells: tuple[str, ...], widths: list[int], right: frozenset[int]) -> str:
    padded = []
    for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - _width(cell))
        padded.append(space + cell if i in right else cell + space)
    return ("  " + "  ".join(padded)).rstrip()


def _width(text: str) -> int:
    """Terminal cells of `text`: East Asian wide characters take two, combining marks none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)


def error_line(settings: Settings, message: str) -> str:
    """The line that ends a failed run: `error: ...`, or an event where progress is JSON."""
    if settings.progress == "json":
        return _event("error", message=message)
    colour = styles_on(sys.stderr) and not os.environ.get("NO_COLOR")
    return (click.style("error: ", fg="red") if colour else "error: ") + message + "\n"


def _event(event: str, **values: str) -> str:
    return json.dumps({"event": event, **values}) + "\n"


class Console:
    """Writes for one run of a command. Streams are looked up at each call, so a redirected
    sys.stdout is honoured."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def out_is_terminal(self) -> bool:
        return sys.stdout.isatty()

    def out(self, text: str) -> None:
        """A line of the result."""
        sys.stdout.write(text + "\n")

    def stream(self, text: str) -> None:
        """A piece of the result, shown at once; exact, except that a terminal is protected."""
        sys.stdout.write(terminal_safe(text) if self.out_is_terminal else text)
        sys.stdout.flush()

    def json(self, document: object) -> None:
        """The result as one JSON document; numbers that JSON lacks (inf, nan) become null."""
        self.out(json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False))

    def info(self, text: str, *, dim: bool = False) -> None:
        """A line that is not part of the result; --quiet leaves it out."""
        if self.settings.quiet:
            return
        if self.settings.progress == "json":
            sys.stderr.write(_event("note", text=text))
        else:
            sys.stderr.write(self.style(text, sys.stderr, dim=dim) + "\n")
        sys.stderr.flush()

    def warn(self, text: str) -> None:
        """A line that --quiet does not leave out."""
        if self.settings.progress == "json":
            sys.stderr.write(_event("warning", message=text))
        else:
            sys.stderr.write(self.style("warning: ", sys.stderr, fg="yellow") + text + "\n")

    def error(self, text: str) -> None:
        """The line of a failure."""
        sys.stderr.write(error_line(self.settings, printable(text)))

    def style(self, text: str, stream: TextIO, *, fg: str | None = None, dim: bool = False) -> str:
        """`text` with control codes where `stream` may carry them."""
        if not styles_on(stream) or not (fg or dim):
            return text
        return click.style(text, fg=None if os.environ.get("NO_COLOR") else fg, dim=dim or None)

    def table(self, table: Table) -> None:
        """A table of the result: drawn on a terminal, aligned text elsewhere."""
        if not styles_on(sys.stdout):
            self.out(plain_table(table) + "\n")
            return
        from rich.console import Console as RichConsole

        RichConsole(file=sys.stdout).print(_rich_table(table))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _rich_table(table: Table) -> object:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(
        title=Text(table.title) if table.title else None, box=box.SIMPLE_HEAD, title_justify="left"
    )
    for i, name in enumerate(table.columns):
        drawn.add_column(Text(name), justify="right" if i in table.right else "left")
    for row in table.rows:
        drawn.add_row(*(Text(cell, overflow="fold") for cell in row))
    return drawn


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def format_count(count: int) -> str:
    """134515008 -> "134.5M"."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def format_seconds(seconds: float | None) -> str:
    """0.0123 -> "12.3 ms"; None -> "-"."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
