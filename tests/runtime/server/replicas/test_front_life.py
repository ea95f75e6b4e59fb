"""The front on a real socket: starting, draining, and replicas that come and go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from trtllm_lite.runtime.errors import EngineDeadError, TrtllmLiteError
from trtllm_lite.runtime.server.listening import bind, url_of
from trtllm_lite.runtime.server.replicas import life
from trtllm_lite.runtime.server.replicas.life import FrontServer
from trtllm_lite.runtime.server.replicas.messages import Piece
from trtllm_lite.runtime.server.settings import ServerConfig

FleetOf = Callable[..., Any]
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)
PATH = "/v1/completions"


@dataclass
class Running:
    """A front that listens, and a client of it."""

    server: FrontServer
    task: "asyncio.Future[int]"
    client: httpx.AsyncClient
    ready: asyncio.Event

    def tell(self) -> None:
        assert self.server.stops is not None
        self.server.stops.tell()

    async def status(self, path: str, wanted: int) -> httpx.Response:
        """Ask until the status is this one."""
        while True:
            answer = await self.client.get(path)
            if answer.status_code == wanted:
                return answer
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(fleet: Any, config: ServerConfig | None = None) -> AsyncIterator[Running]:
    ready = asyncio.Event()
    server = FrontServer(config or ServerConfig(), fleet, ready.set, "9.9")
    sock = bind("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=url_of(sock), timeout=10) as client:
        task = asyncio.ensure_future(server.run(sock))
        await asyncio.sleep(0)
        it = Running(server, task, client, ready)
        try:
            yield it
        finally:
            fleet.may_start.set()
            if not task.done():
                it.tell()
                it.tell()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "LOOK_SECONDS", 0.01)


def test_it_listens_while_replicas_start_and_drains_at_the_end(fleet_of: FleetOf) -> None:
    async def main() -> None:
        later = asyncio.Event()
        fleet = fleet_of([Piece(200, EVENTS, b"a"), later, Piece(body=b"b", last=True)])
        fleet.may_start.clear()
        async with running(fleet) as it:
            told = await it.status("/ready", 503)
            assert told.json()["step"] == "start the replicas"
            fleet.may_start.set()
            await it.ready.wait()
            asking = asyncio.ensure_future(it.client.post(PATH, content=b"{}"))
            while not fleet.sent:
                await asyncio.sleep(0.001)
            it.tell()
            await asyncio.sleep(0.01)
            late = await it.client.post(PATH, content=b"{}")
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            later.set()
            assert (await asking).text == "ab"
            assert await it.task == 0
        assert fleet.closed == 1

    asyncio.run(main())


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_what_does_not_end_is_aborted(fleet_of: FleetOf, how: str) -> None:
    async def main() -> None:
        fleet = fleet_of([Piece(200, EVENTS, b"data: {}\n\n"), asyncio.Event()])
        config = ServerConfig(drain_timeout=60 if how == "second signal" else 0.05)
        async with running(fleet, config) as it:
            await it.ready.wait()
            asking = asyncio.ensure_future(it.client.post(PATH, content=b"{}"))
            while not fleet.sent:
                await asyncio.sleep(0.001)
            it.tell()
            if how == "second signal":
                await asyncio.sleep(0.01)
                it.tell()
            assert '"code":"aborted"' in (await asking).text
            assert await it.task == 1
        assert (fleet.closed, fleet.ended) == (1, 1)

    asyncio.run(main())


def test_a_client_that_leaves_ends_its_request(fleet_of: FleetOf) -> None:
    async def main() -> None:
        fleet = fleet_of([Piece(200, EVENTS, b"a"), asyncio.Event()], [asyncio.Event()])
        async with running(fleet) as it:
            await it.ready.wait()
            async with it.client.stream("POST", PATH, content=b"{}") as answer:
                await anext(answer.aiter_bytes())
            while fleet.ended < 1:
                await asyncio.sleep(0.001)
            with pytest.raises(httpx.ReadTimeout):
                await it.client.post(PATH, content=b"{}", timeout=0.1)
            while fleet.ended < 2:
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_without_a_replica_requests_are_refused_until_one_is_back(fleet_of: FleetOf) -> None:
    async def main() -> None:
        fleet = fleet_of([Piece(200, EVENTS, b"a", True)])
        async with running(fleet) as it:
            await it.ready.wait()
            fleet.count = 0
            told = await it.status("/ready", 503)
            assert told.json()["step"] == "start a replica again"
            assert (await it.client.post(PATH, content=b"{}")).status_code == 503
            fleet.count = 1
            await it.status("/ready", 200)
            assert (await it.client.post(PATH, content=b"{}")).status_code == 200
            text = (await it.client.get("/metrics")).text
            assert "trtllm_lite_replicas_running 1.0" in text

    asyncio.run(main())


def test_a_fleet_without_a_keeper_ends_the_server(fleet_of: FleetOf) -> None:
    async def main() -> None:
        fleet = fleet_of([])
        async with running(fleet) as it:
            await it.ready.wait()
            fleet.lost = True
            with pytest.raises(EngineDeadError, match="nobody looks after"):
                await it.task
        assert fleet.closed == 1

    asyncio.run(main())


def test_what_starting_raises_is_raised(fleet_of: FleetOf) -> None:
    async def main() -> None:
        fleet = fleet_of([])
        fleet.failure = TrtllmLiteError("there is no bundle")
        async with running(fleet) as it:
            with pytest.raises(TrtllmLiteError, match="no bundle"):
                await it.task
        assert fleet.closed == 1

    asyncio.run(main())


def test_a_stop_while_they_start_does_not_wait_for_them(fleet_of: FleetOf) -> None:
    async def main() -> None:
        fleet = fleet_of([])
        fleet.may_start.clear()
        async with running(fleet) as it:
            await it.status("/live", 200)
            it.tell()
            assert await it.task == 0
            assert it.server.left_behind

    asyncio.run(main())
