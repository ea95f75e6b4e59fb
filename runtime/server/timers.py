"""uvicorn's HTTP/1.1 protocol with what it lacks: a timer on request heads, so that slow senders do
not pile up (slowloris), and a polite end for connections that are too many."""

import asyncio
from dataclasses import dataclass
from typing import ClassVar

import h11
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

TURNED_AWAY = 32
"""Connections beyond those allowed that are answered; further ones are closed unheard, before the
process has no descriptor left to accept them with."""


@dataclass(frozen=True)
class ConnectionRules:
    """head_seconds: for a request's head, from the connection's start for its first request, from
    the first byte for later ones (uvicorn's keep-alive timer covers the silence). most: connections
    at the same time; those beyond are served by `overflow`."""

    head_seconds: float
    most: int
    overflow: ASGIApp


def ruled_protocol(rules: ConnectionRules) -> type[H11Protocol]:
    """The protocol that keeps to these rules, as uvicorn takes it: it makes the instances."""

    class Protocol(RuledProtocol):
        _rules = rules

    return Protocol


class RuledProtocol(H11Protocol):
    """One connection; see `ruled_protocol`."""

    _rules: ClassVar[ConnectionRules]
    _head_timer: asyncio.TimerHandle | None = None

    # As uvicorn declares it: asyncio only ever passes a Transport to this protocol.
    def connection_made(
        self,
        transport: asyncio.Transport,  # type: ignore[override]  # narrower than asyncio's base
    ) -> None:
        super().connection_made(transport)
        surplus = len(self.connections) - self._rules.most
        if surplus > TURNED_AWAY:
            transport.abort()
            return
        if surplus > 0:
            self.app = self._rules.overflow
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
            seconds = self._rules.head_seconds
            self._head_timer = self.loop.call_later(seconds, self._head_is_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.transport.close()
