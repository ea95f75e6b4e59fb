"""One server's life: bound, loading, ready, draining, gone."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import EngineDeadError
from trtllm_lite.runtime.server.app import create_app
from trtllm_lite.runtime.server.metrics import Metrics
from trtllm_lite.runtime.server.overflow import Overflow
from trtllm_lite.runtime.server.request_log import RequestLog
from trtllm_lite.runtime.server.service import Loading, ModelCard, Service
from trtllm_lite.runtime.server.settings import Limits, ServerConfig
from trtllm_lite.runtime.server.timers import ConnectionRules, ruled_protocol
from trtllm_lite.runtime.server.tracing import Tracer

Model = tuple[AsyncLLM, ModelCard]
Loader = Callable[["LoadProgress"], Model]
T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCH_SECONDS = 5.0
"""Between two looks at the engine."""
LAST_WORDS_SECONDS = 2.0
"""How long requests that were aborted may take to tell their clients."""
_log = logging.getLogger(__name__)


class LoadProgress:
    """A `Progress` that keeps what the routes tell of loading the model that comes after `before`
    of `models` in all."""

    def __init__(self, loading: Loading, before: int = 0, models: int = 1) -> None:
        self._loading = loading
        self._before = before
        self._models = models
        self.step("open the bundle")

    def step(self, name: str) -> None:
        several = f"model {self._before + 1} of {self._models}: " if self._models > 1 else ""
        self._loading.step = f"{several}{name}"
        self._tell(0)

    def advance(self, done: int, total: int, unit: str) -> None:
        if total > 0:
            self._tell(min(100, 100 * done // total))

    def note(self, text: str) -> None:
        """Nothing that a client of the server needs."""

    def _tell(self, percent: int) -> None:
        self._loading.percent = (100 * self._before + percent) // self._models


class Stops:
    """Counts the times that the server was told to stop: once is to drain, twice to abort."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def tell(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class Server:
    """Runs one `Service` behind HTTP. `load` opens the model, in a thread of its own, and `others`
    further ones after it, in order; `announce` is told when requests are taken."""

    def __init__(
        self,
        config: ServerConfig,
        load: Loader,
        announce: Callable[[Service], None],
        version: str,
        tracer: Tracer | None = None,
        others: Sequence[Loader] = (),
    ) -> None:
        self._config = config
        self._loads = (load, *others)
        self._announce = announce
        self._version = version
        self._tracer = tracer
        self.stops: Stops | None = None
        self.left_behind = False
        """Set when `run` ended while a thread was at work that cannot be interrupted: loading,
        or a step that hangs. The program should then end at once."""

    async def run(self, sock: socket.socket) -> int:
        """Serve on a bound socket until told to stop. Returns the exit code: 0, or 1 when running
        requests had to be aborted. Raises what loading raises, and EngineDeadError."""
        self.stops = stops = Stops()
        service = Service(self._config, tracer=self._tracer)
        app = create_app(service, self._version)
        http = http_server(app, self._config.limits, service.metrics)
        with stop_signals(stops):
            serving = asyncio.ensure_future(http.serve(sockets=[sock]))
            try:
                return await self._live(service, stops, serving)
            finally:
                http.should_exit = True
                await serving

    async def _live(self, service: Service, stops: Stops, serving: "asyncio.Future[None]") -> int:
        models = await self._loaded(service, stops, serving)
        if models is None:
            self.left_behind = True
            return 0
        engines = [llm for llm, _ in models]
        watching = [asyncio.ensure_future(_watch(service, llm)) for llm in engines]
        try:
            for llm, card in models:
                service.ready(llm, card)
            self._announce(service)
            await first_of([serving], [stops.first, service.died])
            if service.died.is_set():
                raise EngineDeadError(service.reason)
            return await _drain(service, stops, engines)
        finally:
            for watch in watching:
                watch.cancel()
            self.left_behind |= not await _close(engines)

    async def _loaded(
        self, service: Service, stops: Stops, serving: "asyncio.Future[None]"
    ) -> list[Model] | None:
        """All models, one after the other: each finds what memory those before it have left. None
        when told to stop meanwhile."""
        models: list[Model] = []
        async with AsyncExitStack() as opened:
            for before, load in enumerate(self._loads):
                progress = LoadProgress(service.loading, before, len(self._loads))
                loading = in_thread(partial(load, progress))
                await first_of([loading, serving], [stops.first])
                if not loading.done():
                    return None
                models.append(await loading)
                opened.push_async_callback(_close, [models[-1][0]])
            opened.pop_all()
        return models


def in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Its result, from a thread that the end of the program does not wait for: loading cannot be
    interrupted."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended before the loading
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name="trtllm-lite-load", daemon=True).start()
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


async def _drain(service: Service, stops: Stops, engines: Sequence[AsyncLLM]) -> int:
    """Let what runs end, up to the drain timeout or the second signal; abort the rest."""
    service.drain()
    inside, seconds = service.admission, service.config.drain_timeout
    await first_of([], [inside.empty, stops.second], seconds)
    if not inside.requests:
        return 0
    _log.warning("%d requests are aborted", inside.requests)
    await _close(engines)
    await first_of([], [inside.empty], LAST_WORDS_SECONDS)
    return 1


async def _close(engines: Sequence[AsyncLLM]) -> bool:
    """Close all engines. False when a step that hangs keeps one of them."""
    closing = [asyncio.ensure_future(llm.close()) for llm in engines]
    closed, hanging = await asyncio.wait(closing, timeout=LAST_WORDS_SECONDS)
    for future in hanging:
        future.cancel()
    await asyncio.gather(*closed)
    if hanging:
        _log.error("the engine does not end its step")
    return not hanging


async def first_of(
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


def http_server(app: ASGIApp, limits: Limits, metrics: Metrics) -> _Http:
    """Serves an application under the limits; signals are not its business."""
    overflow = RequestLog(Overflow(limits.connections, metrics), limits.headers)
    rules = ConnectionRules(limits.header_seconds, limits.connections, overflow)
    return _Http(
        uvicorn.Config(
            app,
            http=ruled_protocol(rules),
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
def stop_signals(stops: Stops) -> Iterator[None]:
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
