"""One response on its way through the front, and what its client sees before there is any."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from trtllm_lite.runtime.server.errors import ApiError, deadline_passed
from trtllm_lite.runtime.server.exchange import KEEP_ALIVE, Exchange
from trtllm_lite.runtime.server.replicas.fleet import ReplicaLostError
from trtllm_lite.runtime.server.replicas.messages import Piece
from trtllm_lite.runtime.server.settings import ServerConfig

_EVENTS = b"text/event-stream"


class Relay:
    """Copies one response to its client. While there is none, a client that wants a stream
    (`is_stream`) gets a comment now and then; a response that turns out to be none is then told as
    the stream's last event."""

    def __init__(
        self, exchange: Exchange, config: ServerConfig, is_stream: Callable[[], Awaitable[bool]]
    ) -> None:
        self._exchange = exchange
        self._config = config
        self._is_stream = is_stream
        self._events = False
        self._other: bytearray | None = None
        self.begun = False
        """Whether the client has seen anything of a response."""

    async def take(self, pieces: AsyncGenerator[Piece, None]) -> None:
        """Every piece, the first one within the time that a request has: later ones are in the
        replica's care, which has the same limit. Raises ApiError, ReplicaLostError,
        ClientGoneError."""
        seconds = self._config.request_timeout
        try:
            async with asyncio.timeout(seconds) as waiting:
                first = await self._first(pieces)
                waiting.reschedule(None)
                if first is not None:
                    await self._copy(first)
                async for piece in pieces:
                    await self._copy(piece)
        except TimeoutError:
            raise deadline_passed(seconds) from None
        if not self._exchange.complete:
            raise ReplicaLostError

    async def fail(self, error: ApiError) -> None:
        """Tell the client: as the last event of a stream that has begun; otherwise `error` is
        raised, which is the response, or breaks off a body that has no place for it."""
        if not (self._exchange.started and self._events):
            raise error
        await self._exchange.end_with_error(error)

    async def _first(self, pieces: AsyncGenerator[Piece, None]) -> Piece | None:
        """The first piece, None where there is none, with comments until it comes."""
        coming, beat = asyncio.ensure_future(_next(pieces)), self._config.keep_alive_seconds
        try:
            await asyncio.wait({coming}, timeout=beat)
            if not coming.done() and await self._is_stream():
                while not coming.done():
                    await self._say_nothing()
                    await asyncio.wait({coming}, timeout=beat)
            return await coming
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _say_nothing(self) -> None:
        if not self._exchange.started:
            self._events = True
            await self._exchange.start_events()
        await self._exchange.write(KEEP_ALIVE)

    async def _copy(self, piece: Piece) -> None:
        self.begun = True
        if piece.status is not None:
            await self._start(piece)
        if self._other is not None:
            self._other += piece.body
            if piece.last:
                await self._exchange.end_with_body(bytes(self._other))
        elif piece.body or piece.last:
            await self._exchange.write(piece.body, last=piece.last)

    async def _start(self, piece: Piece) -> None:
        kinds = [value for name, value in piece.headers if name == b"content-type"]
        is_stream = any(kind.startswith(_EVENTS) for kind in kinds)
        if not self._exchange.started:
            self._events = is_stream
            await self._exchange.start(piece.status or 200, list(piece.headers))
        elif not is_stream:
            self._other = bytearray()


async def _next(pieces: AsyncGenerator[Piece, None]) -> Piece | None:
    return await anext(pieces, None)
