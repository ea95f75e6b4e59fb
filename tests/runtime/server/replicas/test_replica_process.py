"""A replica without Ray: requests in, pieces of responses out."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import EngineDeadError
from trtllm_lite.runtime.server.replicas.messages import Forwarded, Piece, forwarded
from trtllm_lite.runtime.server.replicas.numbers import read_numbers
from trtllm_lite.runtime.server.replicas.replica import MOST_WAITING, Replica, ReplicaPlan
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import ServerConfig

NewLLM = Callable[[bool], tuple[AsyncLLM, Any]]
Test = Callable[[Replica, Any], Coroutine[Any, Any, None]]
LONG = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}


def request(path: str, body: Any = None, method: str = "POST") -> Forwarded:
    data = b"" if body is None else json.dumps(body).encode()
    headers = [(b"host", b"x"), (b"content-type", b"application/json")]
    scope = {
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [*headers, (b"authorization", b"Bearer k"), (b"content-length", b"9")],
        "client": ("10.0.0.9", 4),
    }
    return forwarded(scope, data, "id-1")


async def answer(replica: Replica, asked: Forwarded) -> tuple[int | None, bytes, list[Piece]]:
    pieces = [piece async for piece in replica.serve(asked)]
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [piece.status is None for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    return pieces[0].status, b"".join(piece.body for piece in pieces), pieces


async def numbers_of(replica: Replica) -> bytes:
    """What it tells at a health check."""
    await replica.check_health()
    folder = replica._numbers
    assert folder is not None
    return read_numbers(folder, 60)[str(os.getpid())]


@pytest.fixture
def run(new_llm: NewLLM, card: ModelCard, tmp_path: Path) -> Callable[..., None]:
    def run(test: Test, *, is_open: bool = True, config: ServerConfig | None = None) -> None:
        async def main() -> None:
            llm, session = new_llm(is_open)
            session.end = Mock()
            settings = config or ServerConfig()
            plan = ReplicaPlan(lambda: [(llm, card)], settings, "9.9", tmp_path, session.end)
            replica = Replica(plan)
            try:
                await asyncio.wait_for(test(replica, session), 20)
            finally:
                session.permits.release(1_000)
                await replica.close()

        asyncio.run(main())

    return run


def test_it_answers_as_the_server_does(run: Callable[..., None]) -> None:
    async def test(replica: Replica, session: Any) -> None:
        status, body, pieces = await answer(replica, request("/v1/completions", LONG))
        assert status == 200
        text = json.loads(body)["choices"][0]["text"]
        assert dict(pieces[0].headers)[b"x-request-id"] == b"id-1"
        status, body, _ = await answer(
            replica, request("/v1/completions", {**LONG, "stream": True})
        )
        frames = body.decode().split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        made = [json.loads(f.removeprefix("data: ")) for f in frames[:-2]]
        assert "".join(m["choices"][0]["text"] for m in made) == text
        assert (await answer(replica, request("/v1/models", method="GET")))[0] == 200
        assert (await answer(replica, request("/v1/completions", {"prompt": 1.5})))[0] == 400
        assert (await answer(replica, request("/no/such")))[0] == 404

    run(test)


def test_a_stream_comes_as_it_is_made(run: Callable[..., None]) -> None:
    async def test(replica: Replica, session: Any) -> None:
        session.permits.release(2)
        asked = request("/v1/completions", {**LONG, "stream": True})
        async with aclosing(replica.serve(asked)) as pieces:
            first = await anext(pieces)
            assert (first.status, first.last) == (200, False)
            assert first.body.startswith(b"data: ")

    run(test, is_open=False)


def test_a_silent_stream_has_its_comments(run: Callable[..., None]) -> None:
    async def test(replica: Replica, session: Any) -> None:
        asked = request("/v1/completions", {**LONG, "stream": True})
        async with aclosing(replica.serve(asked)) as pieces:
            first, second = await anext(pieces), await anext(pieces)
            assert (first.status, first.body + second.body) == (200, 2 * b": keep-alive\n\n")

    run(test, is_open=False, config=ServerConfig(keep_alive_seconds=0.01))


@pytest.mark.parametrize("stream", [True, False])
def test_who_stops_taking_pieces_ends_the_request(run: Callable[..., None], stream: bool) -> None:
    async def test(replica: Replica, session: Any) -> None:
        session.permits.release(2)
        asked = request("/v1/completions", {**LONG, "stream": stream})
        taking = asyncio.ensure_future(answer(replica, asked))
        await asyncio.to_thread(session.entered.wait)
        await asyncio.sleep(0.01)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        session.permits.release(1000)
        while not re.search(rb"requests_aborted_total\{.*\} 1.0", await numbers_of(replica)):
            await asyncio.sleep(0.001)

    run(test, is_open=False)


def test_an_answer_that_nobody_takes_is_bounded(run: Callable[..., None]) -> None:
    async def test(replica: Replica, session: Any) -> None:
        sent = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal sent
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(10 * MOST_WAITING):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                sent += 1
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        replica._app = app  # type: ignore[assignment]  # any ASGI application will do
        async with aclosing(replica.serve(request("/"))) as pieces:
            await anext(pieces)
            for _ in range(50):
                await asyncio.sleep(0)
            assert sent <= 2 * MOST_WAITING
            bodies = [piece.body async for piece in pieces]
        assert sent == 10 * MOST_WAITING
        assert len(bodies) < 100

    run(test)


def test_what_the_routes_raise_reaches_the_front(run: Callable[..., None]) -> None:
    async def test(replica: Replica, session: Any) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise ValueError("out of order")

        replica._app = app  # type: ignore[assignment]  # any ASGI application will do
        with pytest.raises(ValueError, match="out of order"):
            await answer(replica, request("/"))

    run(test)


def test_a_sound_replica_is_healthy(run: Callable[..., None]) -> None:
    async def test(replica: Replica, session: Any) -> None:
        assert b"trtllm_lite_requests_accepted_total" in await numbers_of(replica)
        assert (await answer(replica, request("/v1/completions", LONG)))[0] == 200
        assert session.end.call_count == 0

    run(test)


def test_an_engine_that_hangs_or_has_died_is_not(run: Callable[..., None]) -> None:
    async def test(replica: Replica, session: Any) -> None:
        asking = asyncio.ensure_future(answer(replica, request("/v1/completions", LONG)))
        await asyncio.to_thread(session.entered.wait)
        with pytest.raises(TimeoutError):
            await replica.check_health()
        assert session.end.call_count == 1
        session.fatal = True
        session.permits.release(1000)
        assert (await asking)[0] == 503
        assert session.end.call_count == 2
        with pytest.raises(EngineDeadError):
            await replica.check_health()
        assert session.end.call_count == 3

    run(test, is_open=False, config=ServerConfig(step_timeout=0.05))


def test_keys_stay_at_the_front() -> None:
    asked = request("/v1/models", {"a": 1})
    names = [name for name, _ in asked.scope()["headers"]]
    assert b"authorization" not in names
    assert names.count(b"content-length") == 1
    assert dict(asked.scope()["headers"])[b"content-length"] == b"8"
    assert asked.scope()["client"] == ("10.0.0.9", 0)
