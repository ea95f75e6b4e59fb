"""Log lines: text for people, or one JSON object a line. Control characters of clients' text are
escaped in both, so nobody forges a line."""

import json
import logging
import sys
import time
from typing import Literal, TextIO

from trtllm_lite.runtime.server.request_log import ACCESS

LogFormat = Literal["text", "json"]
_ROOTS = ("trtllm_lite", "uvicorn.error", "opentelemetry")
"""Of uvicorn only what is wrong: its own access log and start-up lines are ours to write."""


def configure_logging(form: LogFormat, stream: TextIO | None = None) -> None:
    """Send the program's log to `stream` (stderr), in that form. For the main program only."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in _ROOTS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    logging.getLogger(ACCESS).setLevel(logging.INFO)


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00Z info request request_id=... status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_time(record), record.levelname.lower(), _escaped(record.getMessage())]
        words += [f"{name}={_word(value)}" for name, value in _facts(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One object a line; a traceback is a string in it."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def _facts(record: logging.LogRecord) -> dict[str, object]:
    facts = getattr(record, "facts", {})
    return facts if isinstance(facts, dict) else {}


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))


def _word(value: object) -> str:
    text = "-" if value is None else _escaped(str(value))
    return json.dumps(text) if " " in text else text


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
