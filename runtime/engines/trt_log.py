"""What TensorRT logs, for those who have to read it.

A process has one TensorRT logger: the first one that is registered stays, and later ones are
ignored while any object that was made with it lives. So there is one here for each module, and
whoever wants messages listens to it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

_log = logging.getLogger(__name__)


@dataclass
class Messages:
    """What was logged while somebody listened."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Everything else, memory sizes among it."""


class SharedLogger:
    """Passes messages to Python's logging and to whoever listens. Messages may come from threads
    of TensorRT's own."""

    def __init__(self, module: Any) -> None:
        self._listeners: list[Messages] = []
        self.for_tensorrt = _make_logger(module, self._take)

    @contextmanager
    def listening(self) -> Iterator[Messages]:
        """The messages from now on until the end of the block."""
        messages = Messages()
        self._listeners.append(messages)
        try:
            yield messages
        finally:
            # Messages with equal contents are equal, and not the same.
            self._listeners[:] = [m for m in self._listeners if m is not messages]

    def _take(self, severity: str, text: str) -> None:
        level = _LEVELS.get(severity, logging.DEBUG)
        _log.log(min(level, logging.INFO), "%s", text)
        for messages in tuple(self._listeners):
            if level >= logging.ERROR:
                messages.errors.append(text)
            elif level == logging.WARNING:
                messages.warnings.append(text)
            else:
                messages.lines.append(text)


_LEVELS = {
    "INTERNAL_ERROR": logging.ERROR,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
}


@cache
def shared_logger(module: Any) -> SharedLogger:
    """The logger of this process for an imported TensorRT."""
    return SharedLogger(module)


def _make_logger(module: Any, take: Any) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]  # a class known at run time only
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            take(severity.name, text)

    return Logger()
