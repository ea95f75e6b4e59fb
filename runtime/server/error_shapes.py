"""The shapes of an error's JSON. Which one a client gets is told by the path that it asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

MESSAGES = "/v1/messages"
"""The path of Anthropic's API."""
_BY_STATUS: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)
_TIMEOUTS = frozenset({"deadline_exceeded", "body_timeout"})


@dataclass(frozen=True)
class ErrorFacts:
    """What is told of an error, whatever the shape. `request_id` is None where it is not known."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None
    request_id: str | None = None


def is_anthropic(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def shaped(facts: ErrorFacts, path: str) -> dict[str, Any]:
    """The error as clients of that path know errors."""
    return _anthropic(facts) if is_anthropic(path) else _openai(facts)


def _openai(facts: ErrorFacts) -> dict[str, Any]:
    inner = {"message": facts.message, "type": facts.kind, "param": facts.param, "code": facts.code}
    return {"error": inner}


def _anthropic(facts: ErrorFacts) -> dict[str, Any]:
    """https://docs.anthropic.com/en/api/errors. Overload is 529 there and 503 here, which its
    clients try again just the same."""
    kind = _BY_STATUS.get(facts.status)
    if facts.code in _TIMEOUTS:
        kind = "timeout_error"
    if kind is None:
        kind = "invalid_request_error" if facts.status < 500 else "api_error"
    error = {"type": kind, "message": facts.message}
    return {"type": "error", "error": error, "request_id": facts.request_id}
