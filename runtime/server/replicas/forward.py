"""The front's endpoint: gives a request to a replica, and the replica's answer to the client."""

import asyncio
import logging
from contextlib import aclosing
from functools import partial

from starlette.types import Receive, Scope, Send

from trtllm_lite.runtime.server.body import read_body
from trtllm_lite.runtime.server.errors import (
    ApiError,
    ClientGoneError,
    from_exception,
    unavailable,
)
from trtllm_lite.runtime.server.exchange import Exchange
from trtllm_lite.runtime.server.replicas.fleet import Fleet, QueueFullError, ReplicaLostError
from trtllm_lite.runtime.server.replicas.messages import Forwarded, forwarded
from trtllm_lite.runtime.server.replicas.metrics import FrontMetrics
from trtllm_lite.runtime.server.replicas.prompt_text import asks_for_stream, beginning
from trtllm_lite.runtime.server.replicas.relay import Relay
from trtllm_lite.runtime.server.service import Service

TRIES = 2
"""A request that no client has seen a byte of is run again when its replica dies. Once only: one
that kills replicas must not go through all of them."""
RETRY_SECONDS = 1
_log = logging.getLogger(__name__)


class Forward:
    """An ASGI endpoint for every path that the front does not answer itself."""

    def __init__(self, service: Service, fleet: Fleet, numbers: FrontMetrics) -> None:
        self._service = service
        self._fleet = fleet
        self._numbers = numbers
        self._running: set[asyncio.Task[None]] = set()
        self._aborted = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        exchange = Exchange(scope, receive, send, service.config.stall_seconds)
        try:
            service.check_open()
            body = await read_body(scope, receive, service.config.limits)
            service.check_open()
            prompt = await self._prompt(scope, body)
            request = forwarded(scope, body, scope["state"]["request_id"], prompt)
            with service.admission.admitted(1):
                is_stream = partial(self._is_stream, scope, body)
                relay = Relay(exchange, service.config, is_stream)
                await exchange.while_connected(self._answer(relay, request))
        except ClientGoneError:
            # Nobody is left to be answered.
            return

    def abort(self) -> None:
        """End all that run: their clients are told so."""
        self._aborted = True
        for task in self._running:
            task.cancel()

    async def _prompt(self, scope: Scope, body: bytes) -> str:
        """Never empty where a router looks at it: requests without text are alike by their path."""
        if not self._fleet.by_prefix:
            return ""
        limits = self._service.config.limits
        path: str = scope["path"]
        return await asyncio.to_thread(beginning, body, limits) or path

    async def _is_stream(self, scope: Scope, body: bytes) -> bool:
        limits = self._service.config.limits
        return await asyncio.to_thread(asks_for_stream, scope["path"], body, limits)

    async def _answer(self, relay: Relay, request: Forwarded) -> None:
        task = asyncio.ensure_future(self._tried(relay, request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await task
        except asyncio.CancelledError:
            if not self._aborted:
                task.cancel()
                raise
            await relay.fail(unavailable("the server stopped the request", "aborted", 5))
        except ClientGoneError:
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                _log.error("a request failed in its replica", exc_info=error)
            await relay.fail(from_exception(error))

    async def _tried(self, relay: Relay, request: Forwarded) -> None:
        for attempt in range(1, TRIES + 1):
            try:
                async with aclosing(self._fleet.send(request)) as pieces:
                    await relay.take(pieces)
                return
            except QueueFullError:
                self._service.metrics.rejected("queue_full")
                message = "as many requests wait for a replica as may; try again later"
                raise unavailable(message, "queue_full", RETRY_SECONDS) from None
            except ReplicaLostError:
                self._numbers.lost()
                if relay.begun or attempt == TRIES or self._service.phase != "ready":
                    message = "the replica that ran the request has died; send it again"
                    raise unavailable(message, "replica_lost", RETRY_SECONDS) from None
