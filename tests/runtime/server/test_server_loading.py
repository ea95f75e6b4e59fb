"""Several models are loaded in order, by one server on a real socket."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import BundleError, EngineDeadError
from trtllm_lite.runtime.server.lifecycle import Loader, LoadProgress, Server
from trtllm_lite.runtime.server.listening import bind, url_of
from trtllm_lite.runtime.server.service import Loading, ModelCard, Service
from trtllm_lite.runtime.server.settings import Limits, ServerConfig

NewLLM = Callable[[bool], tuple[AsyncLLM, Any]]
PROMPT = {"prompt": "hello", "max_tokens": 3}


def loader(llm: AsyncLLM, name: str, gate: threading.Event | None = None) -> Loader:
    """Loads at once, or half of it and the rest when the gate opens."""

    def load(progress: LoadProgress) -> tuple[AsyncLLM, ModelCard]:
        progress.step("pack")
        progress.advance(1, 2, "bytes")
        if gate is not None:
            gate.wait(20)
        return llm, ModelCard((name,), 0, f"fp-{name}")

    return load


class Started:
    """A server with these loaders, and a client of it, in one event loop."""

    def __init__(self, *loads: Loader, config: ServerConfig | None = None) -> None:
        first, *others = loads
        self.ready = asyncio.Event()
        self.server = Server(config or ServerConfig(), first, self._announce, "9.9", others=others)
        self.sock = bind("127.0.0.1", 0)
        self.client = httpx.AsyncClient(base_url=url_of(self.sock), timeout=20)
        self.task = asyncio.ensure_future(self.server.run(self.sock))

    def _announce(self, service: Service) -> None:
        self.ready.set()

    async def __aenter__(self) -> "Started":
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        if self.server.stops is not None and not self.task.done():
            self.server.stops.tell()
            self.server.stops.tell()
        await asyncio.gather(self.task, return_exceptions=True)
        self.sock.close()


def test_models_load_in_order_with_the_percentage_of_all(new_llm: NewLLM) -> None:
    first, second = new_llm(True)[0], new_llm(True)[0]
    gates = threading.Event(), threading.Event()

    async def main() -> None:
        loads = [loader(first, "one", gates[0]), loader(second, "two", gates[1])]
        async with Started(*loads) as it:
            for gate, percent in zip(gates, (25, 75), strict=True):
                health = (await it.client.get("/health")).json()
                while health["percent"] != percent:
                    await asyncio.sleep(0.01)
                    health = (await it.client.get("/health")).json()
                assert health["step"] == f"model {1 if percent == 25 else 2} of 2: pack"
                early = await it.client.post("/v1/completions", json=PROMPT)
                assert early.json()["error"]["code"] == "loading"
                gate.set()
            await it.ready.wait()
            for name in ("one", "two"):
                answer = await it.client.post("/v1/completions", json={**PROMPT, "model": name})
                assert answer.json()["model"] == name

    asyncio.run(main())


def test_one_that_cannot_be_loaded_ends_it_and_closes_the_others(new_llm: NewLLM) -> None:
    first = new_llm(True)[0]

    def broken(progress: LoadProgress) -> tuple[AsyncLLM, ModelCard]:
        raise BundleError("files", "there is no bundle")

    async def main() -> None:
        async with Started(loader(first, "one"), broken) as it:
            with pytest.raises(BundleError, match="no bundle"):
                await it.task
        with pytest.raises(EngineDeadError):
            await first.stats()

    asyncio.run(main())


def test_a_stop_while_the_second_loads_does_not_wait_for_it(new_llm: NewLLM) -> None:
    first, second = new_llm(True)[0], new_llm(True)[0]
    gate = threading.Event()

    async def main() -> None:
        async with Started(loader(first, "one"), loader(second, "two", gate)) as it:
            while (await it.client.get("/health")).json()["percent"] != 75:
                await asyncio.sleep(0.01)
            assert it.server.stops is not None
            it.server.stops.tell()
            assert await it.task == 0
            assert it.server.left_behind
        gate.set()
        await second.close()

    asyncio.run(main())


def test_the_watch_looks_at_every_engine(new_llm: NewLLM) -> None:
    first, second = new_llm(True)[0], new_llm(True)[0]

    async def main() -> None:
        config = ServerConfig(step_timeout=0.1)
        async with Started(loader(first, "one"), loader(second, "two"), config=config) as it:
            await it.ready.wait()
            await second.close()
            with pytest.raises(EngineDeadError, match="closed"):
                await it.task
            with pytest.raises(EngineDeadError):
                await first.stats()

    asyncio.run(main())


def test_progress_of_one_model_is_that_of_its_step() -> None:
    loading = Loading()
    progress = LoadProgress(loading)
    progress.step("pack")
    for done, percent in ((0, 0), (3, 75), (9, 100)):
        progress.advance(done, 4, "bytes")
        assert (loading.step, loading.percent) == ("pack", percent)
    progress.advance(1, 0, "bytes")
    assert loading.percent == 100
    progress.step("next")
    assert (loading.step, loading.percent) == ("next", 0)


def test_surplus_connections_are_told_and_then_not_even_heard(new_llm: NewLLM) -> None:
    llm = new_llm(True)[0]

    async def main() -> None:
        config = ServerConfig(limits=Limits(connections=1))
        async with Started(loader(llm, "one"), config=config) as it:
            await it.ready.wait()
            address = it.sock.getsockname()
            _, holder = await asyncio.open_connection(*address)
            await asyncio.sleep(0.01)
            async with httpx.AsyncClient(base_url=url_of(it.sock), timeout=20) as client:
                refused = await client.get("/live")
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert refused.json()["error"]["code"] == "too_many_connections"
            assert refused.headers["retry-after"]
            many = [await asyncio.open_connection(*address) for _ in range(50)]
            ends = [asyncio.ensure_future(reader.read()) for reader, _ in many]
            done, _ = await asyncio.wait(ends, timeout=20, return_when="FIRST_COMPLETED")
            assert done
            for writer in (holder, *(writer for _, writer in many)):
                writer.close()
            await asyncio.gather(*ends, return_exceptions=True)
            while (await it.client.get("/live")).status_code != 200:
                await asyncio.sleep(0.01)
            text = (await it.client.get("/metrics")).text
            assert 'requests_rejected_total{reason="too_many_connections"}' in text

    asyncio.run(main())
