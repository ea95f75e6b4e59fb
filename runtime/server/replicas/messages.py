"""What passes between the front and a replica: a request whole, its response in pieces."""

from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Message, Scope

Headers = tuple[tuple[bytes, bytes], ...]

_KEPT_BACK = frozenset(
    {b"authorization", b"x-api-key", b"cookie", b"content-length", b"transfer-encoding"}
)
"""Keys have done their work at the front, and the length is that of the body that is passed on."""
_REQUEST_ID = b"x-request-id"


@dataclass(frozen=True)
class Forwarded:
    """A request that was let in. `prompt`: how its text begins, for routers that keep alike prompts
    together."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: str | None
    prompt: str

    def scope(self) -> Scope:
        """The ASGI scope that the routes of a replica see."""
        length = (b"content-length", str(len(self.body)).encode())
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": [*self.headers, length],
            "client": None if self.client is None else (self.client, 0),
            "server": None,
        }


@dataclass(frozen=True)
class Piece:
    """Part of a response. The first one has its status and headers; `last` ends it."""

    status: int | None = None
    headers: Headers = ()
    body: bytes = b""
    last: bool = False


def forwarded(scope: Scope, body: bytes, request_id: str, prompt: str = "") -> Forwarded:
    """The request of a scope, under the front's id for it."""
    headers = [(k, v) for k, v in scope["headers"] if k not in _KEPT_BACK and k != _REQUEST_ID]
    client = scope.get("client")
    return Forwarded(
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"],
        headers=(*headers, (_REQUEST_ID, request_id.encode())),
        body=body,
        client=client[0] if client else None,
        prompt=prompt,
    )


def joined(messages: Iterable[Message]) -> Piece:
    """One piece for the messages that an ASGI application has sent in a row."""
    status, headers, parts, last = None, (), [], False
    for message in messages:
        if message["type"] == "http.response.start":
            status, headers = message["status"], tuple(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
            last = not message.get("more_body", False)
    return Piece(status, headers, b"".join(parts), last)
