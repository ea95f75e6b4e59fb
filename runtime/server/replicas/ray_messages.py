"""How Ray's messages are read."""

import re

_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*: ")


def cause(told: str) -> str:
    """The last line of a message with tracebacks inside, as Ray writes them, without the name of
    the exception."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return _EXCEPTION.sub("", lines[-1]) if lines else ""
