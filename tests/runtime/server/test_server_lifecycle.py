"""A server on a real socket: bound before it loads, drained when told to stop."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import BundleError, EngineDeadError, TrtllmLiteError
from trtllm_lite.runtime.server import lifecycle
from trtllm_lite.runtime.server.lifecycle import LoadProgress, Server
from trtllm_lite.runtime.server.listening import bind, url_of
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import Limits, ServerConfig

NewLLM = Callable[[bool], tuple[AsyncLLM, Any]]
LONG = {"prompt": "hello", "max_tokens": 50, "ignore_eos": True}
PATH = "/v1/completions"


class Bench:
    """Loads when it is let, and keeps what it made."""

    def __init__(self, new_llm: NewLLM, card: ModelCard, *, is_open: bool = True) -> None:
        self.may_load = threading.Event()
        self.may_load.set()
        self.llm, self.session = new_llm(is_open)
        self._card = card

    def load(self, progress: LoadProgress) -> tuple[AsyncLLM, ModelCard]:
        progress.step("pack")
        progress.advance(3, 4, "bytes")
        self.may_load.wait()
        return self.llm, self._card


@dataclass
class Running:
    """A server that listens, and a client of it."""

    server: Server
    task: "asyncio.Future[int]"
    client: httpx.AsyncClient
    address: tuple[str, int]
    ready: asyncio.Event

    def tell(self) -> None:
        assert self.server.stops is not None
        self.server.stops.tell()

    async def raw(self, data: bytes) -> bytes:
        """What comes back for raw bytes until the server closes."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(data)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer


@asynccontextmanager
async def running(load: Any, config: ServerConfig | None = None) -> AsyncIterator[Running]:
    ready = asyncio.Event()
    server = Server(config or ServerConfig(), load, lambda service: ready.set(), "9.9")
    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()
    async with httpx.AsyncClient(base_url=url_of(sock), timeout=10) as client:
        task = asyncio.ensure_future(server.run(sock))
        await asyncio.sleep(0)
        try:
            yield Running(server, task, client, address, ready)
        finally:
            if not task.done():
                running = Running(server, task, client, address, ready)
                running.tell()
                running.tell()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def bench(new_llm: NewLLM, card: ModelCard) -> Bench:
    return Bench(new_llm, card)


@pytest.fixture
def gated(new_llm: NewLLM, card: ModelCard) -> Bench:
    return Bench(new_llm, card, is_open=False)


def test_it_answers_while_it_loads_and_serves_when_it_has(bench: Bench) -> None:
    async def main() -> None:
        bench.may_load.clear()
        async with running(bench.load) as it:
            health = await it.client.get("/health")
            while health.json().get("percent") != 75:
                await asyncio.sleep(0.01)
                health = await it.client.get("/health")
            assert (health.status_code, health.json()["step"]) == (503, "pack")
            early = await it.client.post(PATH, json=LONG)
            assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
            assert (await it.client.get("/live")).status_code == 200
            bench.may_load.set()
            await it.ready.wait()
            assert (await it.client.get("/ready")).status_code == 200
            whole = await it.client.post(PATH, json=LONG)
            assert whole.status_code == 200
            streamed = await it.client.post(PATH, json={**LONG, "stream": True})
            frames = streamed.text.split("\n\n")[:-2]
            texts = [json.loads(f.removeprefix("data: "))["choices"][0]["text"] for f in frames]
            assert "".join(texts) == whole.json()["choices"][0]["text"]
            before = signal.getsignal(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await it.task == 0
            assert signal.getsignal(signal.SIGTERM) != before
            assert not it.server.left_behind

    handler = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) == handler


def test_what_runs_may_end_after_the_signal(gated: Bench) -> None:
    async def main() -> None:
        async with running(gated.load) as it:
            await it.ready.wait()
            asking = asyncio.ensure_future(it.client.post(PATH, json=LONG))
            while not gated.session.entered.is_set():
                await asyncio.sleep(0.001)
            it.tell()
            await asyncio.sleep(0)
            late = await it.client.post(PATH, json=LONG)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            gated.session.permits.release(1000)
            assert (await asking).status_code == 200
            assert await it.task == 0

    asyncio.run(main())


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_what_does_not_end_is_aborted(gated: Bench, how: str) -> None:
    async def main() -> None:
        config = ServerConfig(drain_timeout=60 if how == "second signal" else 0.05)
        async with running(gated.load, config) as it:
            await it.ready.wait()
            gated.session.permits.release(2)
            body = {**LONG, "stream": True}
            async with it.client.stream("POST", PATH, json=body) as answer:
                parts = answer.aiter_text()
                await anext(parts)
                it.tell()
                if how == "second signal":
                    await asyncio.sleep(0.01)
                    it.tell()
                await asyncio.sleep(0.1)
                gated.session.permits.release(1)
                rest = "".join([part async for part in parts])
            assert '"code":"aborted"' in rest
            assert await it.task == 1

    asyncio.run(main())


def test_a_stop_while_loading_does_not_wait_for_it(bench: Bench) -> None:
    async def main() -> None:
        bench.may_load.clear()
        async with running(bench.load) as it:
            assert (await it.client.get("/live")).status_code == 200
            it.tell()
            assert await it.task == 0
            assert it.server.left_behind
        bench.may_load.set()
        await bench.llm.close()

    asyncio.run(main())


def test_what_loading_raises_is_raised() -> None:
    def load(progress: LoadProgress) -> tuple[AsyncLLM, ModelCard]:
        raise BundleError("files", "there is no bundle")

    async def main() -> None:
        async with running(load) as it:
            with pytest.raises(BundleError, match="no bundle"):
                await it.task

    asyncio.run(main())


def test_a_dead_engine_ends_the_server(gated: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(gated.load) as it:
            await it.ready.wait()
            gated.session.fatal = True
            gated.session.permits.release(1000)
            answer = await it.client.post(PATH, json=LONG)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            with pytest.raises(EngineDeadError):
                await it.task

    asyncio.run(main())
    assert "the engine thread died" in caplog.text


def test_a_connection_that_closes_ends_its_request(gated: Bench) -> None:
    async def main() -> None:
        async with running(gated.load) as it:
            await it.ready.wait()
            gated.session.permits.release(2)
            body = {**LONG, "stream": True}
            async with it.client.stream("POST", PATH, json=body) as answer:
                await anext(answer.aiter_text())
            while (
                'requests_aborted_total{model_name="fake"} 1.0'
                not in (await it.client.get("/metrics")).text
            ):
                await asyncio.sleep(0.01)
            gated.session.permits.release(1000)
            while (await gated.llm.stats()).slots_used:
                await asyncio.sleep(0.001)

    asyncio.run(main())


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: -1\r\n\r\n", b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (HEAD + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000, b"413"),
        (HEAD + b"Content-Length: 90\r\n\r\n{", b"408"),
        (b"GET /live HTTP/1.1\r\n\r\n", b"400"),
    ],
)
def test_bad_requests_are_answered_and_closed(bench: Bench, sent: bytes, status: bytes) -> None:
    async def main() -> None:
        limits = Limits(body_bytes=100, body_seconds=0.05)
        async with running(bench.load, ServerConfig(limits=limits)) as it:
            await it.ready.wait()
            answer = await asyncio.wait_for(it.raw(sent), 5)
            assert answer.split(b" ")[1] == status
            assert (await it.client.get("/live")).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("first", [b"", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_head_that_does_not_come_to_its_end_is_cut_off(bench: Bench, first: bytes) -> None:
    async def main() -> None:
        limits = Limits(header_seconds=0.5)
        async with running(bench.load, ServerConfig(limits=limits)) as it:
            many = [it.raw(first + b"GET /li") for _ in range(20)]
            answers = await asyncio.wait_for(asyncio.gather(*many), 5)
            assert all(b"200 OK" in a for a in answers) if first else answers == [b""] * 20
            assert (await it.client.get("/live")).status_code == 200

    asyncio.run(main())


def test_a_port_that_is_taken_is_one_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TrtllmLiteError, match=f"port {port} of 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_one_line() -> None:
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(TrtllmLiteError) as caught:
            bind(host, 0)
        assert host in str(caught.value)


def test_the_url_tells_the_port_that_was_given() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert isinstance(sock, socket.socket)
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("busy", [True, False])
def test_an_engine_that_hangs_or_dies_unseen_ends_the_server(
    gated: Bench, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LAST_WORDS_SECONDS", 0.2)

    async def main() -> None:
        async with running(gated.load, ServerConfig(step_timeout=0.1)) as it:
            await it.ready.wait()
            if busy:
                asking = asyncio.ensure_future(it.client.post(PATH, json=LONG))
            else:
                await gated.llm.close()
            with pytest.raises(EngineDeadError, match="did not end a step" if busy else "closed"):
                await it.task
            assert it.server.left_behind == busy
            gated.session.permits.release(1000)
            if busy:
                await asyncio.gather(asking, return_exceptions=True)
        await gated.llm.close()

    asyncio.run(main())


def test_a_head_over_its_limit_ends_the_connection(bench: Bench) -> None:
    async def main() -> None:
        async with running(bench.load) as it:
            await it.ready.wait()
            try:
                answer = await it.raw(HEAD + b"X: " + b"y" * 200_000 + b"\r\n\r\n")
                assert answer.split(b" ")[1] == b"400"
            except ConnectionError:
                # What the server has not read is lost, and perhaps its answer with it.
                assert (await it.client.get("/live")).status_code == 200

    asyncio.run(main())
