"""What is expected of a suite: which tests fail here, which are left out, and why.

A text of sections. `fails: REASON` or `left out: REASON` begins one; the lines below it name
tests, one a line: a case (`unit/test_a.py::test_b[c]`), a test with all its cases, a file with all
its tests, or a folder. Of several names that cover a test the longest counts. Empty lines and lines
that begin with # mean nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.errors import UsageError

FAILS, LEFT_OUT = "fails: ", "left out: "
_AFTER_NAME = ("::", "[", "/")


@dataclass(frozen=True)
class Entry:
    """One name, and what becomes of the tests that it covers."""

    name: str
    reason: str
    left_out: bool

    def covers(self, test: str) -> bool:
        rest = test[len(self.name) :]
        return test.startswith(self.name) and (not rest or rest.startswith(_AFTER_NAME))


@dataclass(frozen=True)
class Expected:
    """All of a suite's entries; no name is there twice."""

    entries: tuple[Entry, ...]

    def entry(self, test: str) -> Entry | None:
        """The one that says what becomes of a test; None: it has to pass."""
        found = [entry for entry in self.entries if entry.covers(test)]
        return max(found, key=lambda entry: len(entry.name), default=None)


def read_expected(path: Path) -> Expected:
    """The list of a suite. Raises UsageError that names the line, OSError."""
    return parse_expected(path.read_text(encoding="utf-8"), path.name)


def parse_expected(text: str, name: str) -> Expected:
    """`name` is how errors call the text. Raises UsageError."""
    entries: dict[str, Entry] = {}
    for number, entry in _entries(text, name):
        if entry.name in entries:
            raise UsageError(f"{name}:{number}: {entry.name} is there twice; keep one of them")
        entries[entry.name] = entry
    return Expected(tuple(entries.values()))


def _entries(text: str, name: str) -> Iterator[tuple[int, Entry]]:
    reason, left_out = "", False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        heading = next((head for head in (FAILS, LEFT_OUT) if f"{line} ".startswith(head)), None)
        if heading is not None:
            reason, left_out = line[len(heading) :].strip(), heading == LEFT_OUT
            if not reason:
                raise UsageError(f"{name}:{number}: '{line}' gives no reason; write it behind")
        elif not reason:
            raise UsageError(f"{name}:{number}: got {line!r} before any '{FAILS}' or '{LEFT_OUT}'")
        else:
            yield number, Entry(line, reason, left_out)
