"""What came of one check, and how a check says that it failed or does not apply."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]
Numbers = dict[str, float]
"""What was measured, by name; the unit ends the name (`_s`, `_ms`, `_bytes`), none is a ratio."""

MAX_REASON = 400


@dataclass(frozen=True)
class CheckResult:
    """`lane`: what was examined, as "cuda, tiny". `reason` is empty for a check that passed.
    `notes`: what this program warned of meanwhile."""

    name: str
    lane: str
    status: Status
    reason: str = ""
    numbers: Numbers = field(default_factory=dict)
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


def from_json(values: Mapping[str, Any]) -> CheckResult:
    """A result from its plain values."""
    return CheckResult(**{**values, "notes": tuple(values.get("notes", ()))})


class CheckFailedError(Exception):
    """The check found what is wrong. `numbers` are those measured until then."""

    def __init__(self, reason: str, numbers: Mapping[str, float] | None = None) -> None:
        super().__init__(reason)
        self.numbers = dict(numbers or {})


class CheckSkippedError(Exception):
    """The check does not apply here, and says why."""


def judged(name: str, lane: str, check: Callable[[], Numbers]) -> CheckResult:
    """Run a check. Whatever it raises is its own failure, and nobody else's."""
    start = time.perf_counter()
    status: Status = "passed"
    reason, numbers = "", {}
    heard = _Warnings()
    try:
        with heard.listening():
            numbers = check()
    except CheckSkippedError as error:
        status, reason = "skipped", str(error)
    except CheckFailedError as error:
        status, reason, numbers = "failed", str(error), error.numbers
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return CheckResult(name, lane, status, _line(reason), numbers, seconds, tuple(heard.texts))


def _line(text: str) -> str:
    return " ".join(text.split())[:MAX_REASON]


class _Warnings(logging.Handler):
    """Hears this program's own warnings, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = _line(record.getMessage())
        if text not in self.texts:
            self.texts.append(text)

    @contextmanager
    def listening(self) -> Iterator[None]:
        logger = logging.getLogger("trtllm_lite")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
