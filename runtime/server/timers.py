"""uvicorn's HTTP/1.1 protocol with a timer on request heads, which it lacks: a connection whose
head is not complete in time is closed, so that slow senders do not pile up (slowloris)."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def timed_protocol(seconds: float) -> type[H11Protocol]:
    """The protocol with that many seconds for a head: from the connection's start for its first
    request, from the first byte for later ones (uvicorn's keep-alive timer covers the silence)."""

    class TimedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            # As uvicorn declares it: asyncio only ever passes a Transport to this protocol.
            super().connection_made(transport)
            self._arm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._arm()
            else:
                self._disarm()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            waits = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
            if waits and self.conn.trailing_data[0]:
                # The next head has begun already, and no more of it may ever come.
                self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(seconds, self._head_is_late)

        def _disarm(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_is_late(self) -> None:
            self._head_timer = None
            self.transport.close()

    return TimedProtocol
