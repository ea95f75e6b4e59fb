"""Ways to show `Progress` on stderr: plain lines, JSON lines, or a live bar on a terminal."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from trtllm_lite.runtime.progress import NoProgress, Progress
from trtllm_lite.tools.console import Settings, format_bytes, printable, styles_on

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar
    from rich.progress import TaskID

PLAIN_INTERVAL = 2.0
JSON_INTERVAL = 0.5

Clock = Callable[[], float]


class Closing(Progress, Protocol):
    """A `Progress` that ends its last step when closed; `failed` says that the step did not."""

    def close(self, *, failed: bool = False) -> None: ...


@contextmanager
def progress_shown(settings: Settings) -> Iterator[Progress]:
    """The progress display that the settings ask for; closed at the end, also by an exception."""
    mode = settings.progress
    if mode == "none" or (settings.quiet and mode == "auto"):
        yield NoProgress()
        return
    shown = _display(mode)
    try:
        yield shown
    except BaseException:
        shown.close(failed=True)
        raise
    shown.close()


def _display(mode: str) -> Closing:
    if mode == "json":
        return JsonProgress(_write_stderr)
    if mode == "auto" and sys.stderr.isatty() and styles_on(sys.stderr):
        return RichProgress()
    return PlainProgress(_write_stderr)


def _write_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def amount(done: int, total: int, unit: str) -> str:
    """ "40% (12.0 MiB of 30.0 MiB)", or what is known of it."""
    if unit == "bytes":
        have, want = format_bytes(done), format_bytes(total)
    else:
        have, want = str(done), f"{total} {unit}"
    if total <= 0:
        return have if unit == "bytes" else f"{done} {unit}"
    return f"{100 * done // total}% ({have} of {want})"


def _ending(seconds: float, failed: bool) -> str:
    return f"stopped after {seconds:.1f} s" if failed else f"{seconds:.1f} s"


class PlainProgress:
    """One line a step, closed by its seconds; a line inside a step at most every 2 s.

    A step's name is written at once, so a log shows what is going on.
    """

    def __init__(self, write: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._name: str | None = None
        self._started = self._last = 0.0
        self._line_open = False

    def step(self, name: str) -> None:
        self.close()
        self._name = printable(name)
        self._started = self._last = self._clock()
        self._write(f"{self._name} ... ")
        self._line_open = True

    def advance(self, done: int, total: int, unit: str) -> None:
        if self._clock() - self._last >= PLAIN_INTERVAL:
            self._last = self._clock()
            self._line(f"  {amount(done, total, unit)}")

    def note(self, text: str) -> None:
        self._line(f"  {printable(text)}")

    def close(self, *, failed: bool = False) -> None:
        if self._name is None:
            return
        ending = _ending(self._clock() - self._started, failed) + "\n"
        self._write(ending if self._line_open else f"{self._name}: {ending}")
        self._name, self._line_open = None, False

    def _line(self, text: str) -> None:
        self._write(f"\n{text}\n" if self._line_open else f"{text}\n")
        self._line_open = False


class JsonProgress:
    """One JSON object a line: step, advance (at most two a second, and the last), note, then done
    or stopped."""

    def __init__(self, write: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._name: str | None = None
        self._started = self._last = 0.0

    def step(self, name: str) -> None:
        self.close()
        self._name = name
        self._started = self._clock()
        self._last = self._started - JSON_INTERVAL
        self._emit("step", name=name)

    def advance(self, done: int, total: int, unit: str) -> None:
        if done == total or self._clock() - self._last >= JSON_INTERVAL:
            self._last = self._clock()
            self._emit("advance", name=self._name, done=done, total=total, unit=unit)

    def note(self, text: str) -> None:
        self._emit("note", name=self._name, text=text)

    def close(self, *, failed: bool = False) -> None:
        if self._name is not None:
            seconds = round(self._clock() - self._started, 3)
            self._emit("stopped" if failed else "done", name=self._name, seconds=seconds)
            self._name = None

    def _emit(self, event: str, **values: object) -> None:
        self._write(json.dumps({"event": event, **values}) + "\n")


class RichProgress:
    """A live bar for the present step; finished steps stay as one line each."""

    def __init__(self) -> None:
        self._bar, self._print = _rich_bar()
        self._task: TaskID | None = None
        self._name = ""
        self._started = 0.0
        self._bar.start()

    def step(self, name: str) -> None:
        self._finish(failed=False)
        self._name, self._started = printable(name), time.monotonic()
        self._task = self._bar.add_task(self._name, total=None, amount="")

    def advance(self, done: int, total: int, unit: str) -> None:
        if self._task is not None:
            text = amount(done, total, unit)
            self._bar.update(self._task, completed=done, total=total or None, amount=text)

    def note(self, text: str) -> None:
        self._print(f"  {printable(text)}")

    def close(self, *, failed: bool = False) -> None:
        self._finish(failed)
        self._bar.stop()

    def _finish(self, failed: bool) -> None:
        if self._task is None:
            return
        self._bar.remove_task(self._task)
        self._task = None
        self._print(f"{self._name}: {_ending(time.monotonic() - self._started, failed)}")


def _rich_bar() -> tuple["RichBar", Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichBar
    from rich.text import Text

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
    )
    bar = RichBar(*columns, console=console, transient=True)
    return bar, lambda line: console.print(Text(line))
