"""What one server is configured with: frozen, checked at creation."""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Literal

from trtllm_lite.runtime.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """What a client may send. Checked before anything is allocated for it.

    body_bytes, body_seconds: of one request body. header_bytes, header_seconds, headers: of one
    request's head, from the first byte or the end of the request before. connections: open at the
    same time; one more is answered 503. depth: of nested JSON.
    prompts: in one request; choices: prompts times n. chars_per_token: a prompt of more characters
    than the context length times this is refused before it is tokenized.
    """

    body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0
    header_bytes: int = 32 * 2**10
    header_seconds: float = 10.0
    headers: int = 100
    connections: int = 10_000
    depth: int = 128
    prompts: int = 1024
    choices: int = 1024
    chars_per_token: int = 64


@dataclass(frozen=True)
class ServerConfig:
    """One server. Times are in seconds. Raises UsageError that names the field.

    key_digests: sha256 of every API key that is let in; empty lets everybody in.
    max_queue: sequences of each model that may wait beyond those that run; one more is answered
    503.
    request_timeout: from the first byte of work on a request to its last.
    drain_timeout: how long running requests may take to end once the server is told to stop.
    step_timeout: an engine that takes longer for one step counts as dead.
    cors_origins: origins whose pages may call the server; "*" is all.
    keep_alive_seconds: a silent stream gets a comment this often.
    stall_seconds: a client that takes nothing for this long is dropped.
    metrics_alias: whose names for metrics are there beside ours.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key_digests: tuple[bytes, ...] = ()
    max_queue: int = 64
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    step_timeout: float = 120.0
    cors_origins: tuple[str, ...] = ()
    keep_alive_seconds: float = 15.0
    stall_seconds: float = 60.0
    metrics_alias: Literal["vllm"] | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port: got {self.port}; allowed: 0 (any free one) to 65535")
        if self.max_queue < 0:
            raise UsageError(f"max_queue: got {self.max_queue}; allowed: integers from 0")
        for name in ("request_timeout", "step_timeout", "keep_alive_seconds", "stall_seconds"):
            _check_seconds(name, getattr(self, name), positive=True)
        _check_seconds("drain_timeout", self.drain_timeout, positive=False)


def key_digest(key: str) -> bytes:
    """What is kept of an API key: 32 bytes. Raises UsageError for one that no header can carry."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError("an API key is printable ASCII without blanks")
    return hashlib.sha256(key.encode("ascii")).digest()


def _check_seconds(name: str, value: float, *, positive: bool) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        allowed = "seconds above 0" if positive else "seconds from 0"
        raise UsageError(f"{name}: got {value}; allowed: {allowed}")
