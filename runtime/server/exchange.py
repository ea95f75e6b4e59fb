"""One HTTP exchange: what has been sent to the client, and whether it is still there."""

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from trtllm_lite.runtime.server.error_shapes import is_anthropic
from trtllm_lite.runtime.server.errors import ApiError, ClientGoneError, error_body

T = TypeVar("T")

JSON_TYPE = (b"content-type", b"application/json")
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Exchange:
    """Writes one response. What the client has not taken is bounded by the connection's own
    buffer; a write that it holds up for `stall_seconds` raises ClientGoneError."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_seconds: float) -> None:
        self.scope = scope
        self.receive = receive
        self.started = False
        self.complete = False
        self._send = send
        self._stall_seconds = stall_seconds

    async def reply(self, body: bytes, *, status: int = 200) -> None:
        """A whole JSON response."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [JSON_TYPE, length])
        await self.write(body, last=True)

    async def start_events(self) -> None:
        """200 and the headers of a stream of events."""
        await self.start(200, list(EVENT_HEADERS))

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """More of the body."""
        self.complete = self.complete or last
        await self._put({"type": "http.response.body", "body": data, "more_body": not last})

    async def end_with_error(self, error: ApiError) -> None:
        """The last event of a stream that cannot go on, where nobody knows what came before."""
        await self.end_with_body(error_body(error, self.scope["path"]))

    async def end_with_body(self, body: bytes) -> None:
        """The same, for an error in the form of the path."""
        # Clients of Anthropic's API look at names alone, those of OpenAI's at none.
        name = b"event: error\n" if is_anthropic(self.scope["path"]) else b""
        await self.write(name + frame(body), last=True)

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client leaves before the response is
        complete: that raises ClientGoneError. The request's body must have been read."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self.complete:
                raise ClientGoneError
            return await task
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            continue

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Status and headers of a response whose body is written piece by piece."""
        self.started = True
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _put(self, message: Message) -> None:
        try:
            steps = self._send(message).__await__()
            try:
                waits_for = next(steps)
            except StopIteration:
                # The usual case, in which a timer would cost more than the rest.
                return
            async with asyncio.timeout(self._stall_seconds):
                await _Begun(steps, waits_for)
        except TimeoutError:
            raise ClientGoneError from None
        except OSError:
            # How servers say that the connection is closed (ASGI 2.4).
            raise ClientGoneError from None


class _Begun:
    """The rest of a coroutine whose first step has been taken, and waits for something."""

    def __init__(self, steps: Generator[Any, Any, None], waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._waits_for
        except BaseException as error:
            # A cancelled wait is one inside the coroutine, which ends it there.
            with suppress(StopIteration):
                self._steps.throw(error)
            raise
        yield from self._steps


def frame(data: bytes) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + data + b"\n\n"
