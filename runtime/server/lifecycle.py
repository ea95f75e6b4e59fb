"""One server's life: bound, loading, ready, draining, gone."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import EngineDeadError
from trtllm_lite.runtime.server.app import create_app
from trtllm_lite.runtime.server.service import Loading, ModelCard, Service
from trtllm_lite.runtime.server.settings import ServerConfig
from trtllm_lite.runtime.server.timers import timed_protocol

Loader = Callable[["LoadProgress"], tuple[AsyncLLM, ModelCard]]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCH_SECONDS = 5.0
"""Between two looks at the engine."""
LAST_WORDS_SECONDS = 2.0
"""How long requests that were aborted may take to tell their clients."""
_log = logging.getLogger(__name__)


class LoadProgress:
    """A `Progress` that keeps what the routes tell of loading."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading

    def step(self, name: str) -> None:
        self._loading.percent = 0
        self._loading.step = name

    def advance(self, done: int, total: int, unit: str) -> None:
        if total > 0:
            self._loading.percent = min(100, 100 * done // total)

    def note(self, text: str) -> None:
        """Nothing that a client of the server needs."""


class Stops:
    """Counts the times that the server was told to stop: once is to drain, twice to abort."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def tell(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class Server:
    """Runs one `Service` behind HTTP. `load` opens the model, in a thread of its own; `announce`
    is told when requests are taken."""

    def __init__(
        self,
        config: ServerConfig,
        load: Loader,
        announce: Callable[[Service], None],
        version: str,
    ) -> None:
        self._config = config
        self._load = load
        self._announce = announce
        self._version = version
        self.stops: Stops | None = None
        self.left_behind = False
        """Set when `run` ended while a thread was at work that cannot be interrupted: loading,
        or a step that hangs. The program should then end at once."""

    async def run(self, sock: socket.socket) -> int:
        """Serve on a bound socket until told to stop. Returns the exit code: 0, or 1 when running
        requests had to be aborted. Raises what loading raises, and EngineDeadError."""
        self.stops = stops = Stops()
        service = Service(self._config)
        http = _http_server(service, self._version)
        with _signals(stops):
            serving = asyncio.ensure_future(http.serve(sockets=[sock]))
            try:
                return await self._live(service, stops, serving)
            finally:
                http.should_exit = True
                await serving

    async def _live(self, service: Service, stops: Stops, serving: "asyncio.Future[None]") -> int:
        loading = self._start_loading(service)
        await _first_of([loading, serving], [stops.first])
        if not loading.done():
            self.left_behind = True
            return 0
        llm, card = await loading
        service.ready(llm, card)
        watching = asyncio.ensure_future(_watch(service, llm))
        try:
            self._announce(service)
            await _first_of([serving], [stops.first, service.died])
            if service.died.is_set():
                raise EngineDeadError(service.reason)
            return await _drain(service, stops, llm)
        finally:
            watching.cancel()
            self.left_behind |= not await _close(llm)

    def _start_loading(self, service: Service) -> "asyncio.Future[tuple[AsyncLLM, ModelCard]]":
        """A thread that the end of the program does not wait for: loading cannot be interrupted."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[tuple[AsyncLLM, ModelCard]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if result.done():
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        def work() -> None:
            value, failure = None, None
            try:
                value = self._load(LoadProgress(service.loading))
            except Exception as error:
                failure = error
            with suppress(RuntimeError):  # the loop has ended before the loading
                loop.call_soon_threadsafe(settle, value, failure)

        threading.Thread(target=work, name="trtllm-lite-load", daemon=True).start()
        return result


async def _watch(service: Service, llm: AsyncLLM) -> None:
    """Notice an engine that has died, or does not come to the end of a step."""
    seconds = service.config.step_timeout
    while True:
        try:
            async with asyncio.timeout(seconds):
                await llm.stats()
        except TimeoutError:
            service.die(f"the engine did not end a step within {seconds:g} s")
            return
        except EngineDeadError as error:
            service.die(str(error))
            return
        await asyncio.sleep(min(seconds, WATCH_SECONDS))


async def _drain(service: Service, stops: Stops, llm: AsyncLLM) -> int:
    """Let what runs end, up to the drain timeout or the second signal; abort the rest."""
    service.drain()
    admission, seconds = service.admission, service.config.drain_timeout
    await _first_of([], [admission.empty, stops.second], seconds)
    if not admission.requests:
        return 0
    _log.warning("%d requests are aborted", admission.requests)
    await _close(llm)
    await _first_of([], [admission.empty], LAST_WORDS_SECONDS)
    return 1


async def _close(llm: AsyncLLM) -> bool:
    """Close the engine. False when a step that hangs keeps it."""
    try:
        await asyncio.wait_for(llm.close(), LAST_WORDS_SECONDS)
    except TimeoutError:
        _log.error("the engine does not end its step")
        return False
    return True


async def _first_of(
    futures: Iterable["asyncio.Future[Any]"],
    events: Iterable[asyncio.Event],
    seconds: float | None = None,
) -> None:
    """Wait until one of them is done or set, or the time is up."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait([*futures, *waits], timeout=seconds, return_when="FIRST_COMPLETED")
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


class _Http(uvicorn.Server):
    """uvicorn without its own idea of signals: those are the server's, which drains first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_server(service: Service, version: str) -> _Http:
    limits = service.config.limits
    return _Http(
        uvicorn.Config(
            create_app(service, version),
            http=timed_protocol(limits.header_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, int(LAST_WORDS_SECONDS)),
            h11_max_incomplete_event_size=limits.header_bytes,
        )
    )


@contextmanager
def _signals(stops: Stops) -> Iterator[None]:
    """Signals tell `stops`, where this is the main thread; afterwards they do what they did."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, stops.tell)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
