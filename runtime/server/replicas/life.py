"""The life of a server with replicas: bound, starting them, ready, draining, gone."""

import asyncio
import logging
import socket
from collections.abc import Callable

from trtllm_lite.runtime.errors import EngineDeadError, TrtllmLiteError
from trtllm_lite.runtime.server.lifecycle import (
    LAST_WORDS_SECONDS,
    Stops,
    first_of,
    http_server,
    in_thread,
    stop_signals,
)
from trtllm_lite.runtime.server.replicas.fleet import Fleet
from trtllm_lite.runtime.server.replicas.front import Front
from trtllm_lite.runtime.server.service import Service
from trtllm_lite.runtime.server.settings import ServerConfig

LOOK_SECONDS = 1.0
"""Between two looks at the replicas."""
LOST_SECONDS = 30.0
"""After which a look without an answer means that nobody looks after them any more."""
_log = logging.getLogger(__name__)


class FrontServer:
    """Runs a `Front` behind HTTP. `announce` is told when requests are taken."""

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        announce: Callable[[], None],
        version: str,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._announce = announce
        self._version = version
        self.stops: Stops | None = None
        self.left_behind = False
        """Set when `run` ended while replicas were being started, which cannot be interrupted. The
        program should then end at once."""

    async def run(self, sock: socket.socket) -> int:
        """Serve on a bound socket until told to stop. Returns the exit code: 0, or 1 when running
        requests had to be aborted. Raises what `Fleet.start` raises, and EngineDeadError when
        nobody looks after the replicas any more."""
        self.stops = stops = Stops()
        service = Service(self._config)
        service.loading.step = "start the replicas"
        front = Front(service, self._fleet, self._version)
        http = http_server(front.app, self._config.limits, service.metrics)
        with stop_signals(stops):
            serving = asyncio.ensure_future(http.serve(sockets=[sock]))
            try:
                return await self._live(service, front, stops, serving)
            finally:
                http.should_exit = True
                await serving
                await asyncio.to_thread(self._fleet.close)

    async def _live(
        self, service: Service, front: Front, stops: Stops, serving: "asyncio.Future[None]"
    ) -> int:
        starting = in_thread(self._fleet.start)
        await first_of([starting, serving], [stops.first])
        if not starting.done():
            self.left_behind = True
            return 0
        await starting
        service.phase = "ready"
        watching = asyncio.ensure_future(self._watch(service, front))
        try:
            # Again: what runs replicas may have brought signal handlers of its own.
            with stop_signals(stops):
                self._announce()
                await first_of([serving], [stops.first, service.died])
                if service.died.is_set():
                    raise EngineDeadError(service.reason)
                return await _drain(service, front, stops)
        finally:
            watching.cancel()

    async def _watch(self, service: Service, front: Front) -> None:
        """Notice how many replicas there are; without any, requests are refused at once."""
        while True:
            try:
                async with asyncio.timeout(LOST_SECONDS):
                    running = await asyncio.to_thread(self._fleet.running)
            except (TrtllmLiteError, TimeoutError) as error:
                service.die(str(error) or "nobody tells how the replicas are")
                return
            front.numbers.running(running)
            if service.phase in ("loading", "ready"):
                service.phase = "ready" if running else "loading"
                service.loading.step = "start a replica again"
            await asyncio.sleep(LOOK_SECONDS)


async def _drain(service: Service, front: Front, stops: Stops) -> int:
    """Let what runs end, up to the drain timeout or the second signal; abort the rest."""
    service.drain()
    admission = service.admission
    await first_of([], [admission.empty, stops.second], service.config.drain_timeout)
    if not admission.requests:
        return 0
    _log.warning("%d requests are aborted", admission.requests)
    front.abort()
    await first_of([], [admission.empty], LAST_WORDS_SECONDS)
    return 1
