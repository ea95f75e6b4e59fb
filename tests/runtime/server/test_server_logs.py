"""Log lines: one each, whatever clients send."""

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from trtllm_lite.runtime.server.logs import JsonLines, TextLines, configure_logging


def record(message: str, **facts: object) -> logging.LogRecord:
    made = logging.LogRecord("trtllm_lite.access", logging.INFO, "f", 1, message, (), None)
    vars(made)["facts"] = facts
    return made


def test_text_lines_cannot_be_forged() -> None:
    line = TextLines().format(record("request", path="/a\nfake line\x1b[31m", status=200))
    assert line.isprintable()
    assert line.endswith('info request path="/a\\\\nfake line\\\\x1b[31m" status=200')
    assert TextLines().format(record("x", client=None)).endswith("client=-")


def test_json_lines_hold_the_facts() -> None:
    line = JsonLines().format(record("request", path="/a\nb", status=None, seconds=0.5))
    assert "\n" not in line
    document = json.loads(line)
    assert (document["path"], document["status"], document["seconds"]) == ("/a\nb", None, 0.5)
    assert document["level"] == "info"


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()])
def test_a_traceback_is_kept(formatter: logging.Formatter) -> None:
    made = record("broken")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert "ValueError: why" in formatter.format(made)


@pytest.fixture
def loggers() -> Iterator[None]:
    """Loggers as they were, afterwards."""
    names = ("trtllm_lite", "uvicorn.error", "trtllm_lite.access")
    before = [(n, logging.getLogger(n)) for n in names]
    state = [(x.handlers[:], x.propagate, x.level) for _, x in before]
    yield
    for (_, logger), (handlers, propagate, level) in zip(before, state, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_requests_are_logged_and_chatter_is_not(loggers: None) -> None:
    stream = io.StringIO()
    configure_logging("json", stream)
    logging.getLogger("trtllm_lite.access").info("request", extra={"facts": {"status": 200}})
    logging.getLogger("uvicorn.error").info("Started")
    logging.getLogger("trtllm_lite.runtime.x").warning("careful")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["request", "careful"]
