"""Writing to a client that takes its time, takes nothing, or has gone."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message

from trtllm_lite.runtime.server.errors import ClientGoneError
from trtllm_lite.runtime.server.exchange import Exchange

Sending = Callable[[Message], Awaitable[None]]


async def nothing() -> Message:
    raise AssertionError("nobody reads here")


def exchange(send: Sending, stall_seconds: float) -> Exchange:
    return Exchange({"type": "http", "path": "/"}, nothing, send, stall_seconds)


@pytest.mark.parametrize("waits", [0, 1, 3])
def test_what_a_client_takes_slowly_arrives(waits: int) -> None:
    taken: list[bytes] = []

    async def send(message: Message) -> None:
        for _ in range(waits):
            await asyncio.sleep(0.001)
        taken.append(message["body"])

    async def main() -> None:
        made = exchange(send, 20)
        for data in (b"one", b"two"):
            await made.write(data)
        assert taken == [b"one", b"two"]

    asyncio.run(main())


def test_a_write_that_is_held_up_ends_where_it_waits() -> None:
    ended: list[str] = []

    async def send(message: Message) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("here")

    async def main() -> None:
        with pytest.raises(ClientGoneError):
            await exchange(send, 0.01).write(b"x")
        assert ended == ["here"]
        writing = asyncio.ensure_future(exchange(send, 20).write(b"x"))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert ended == ["here", "here"]

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_connection_that_is_closed_is_a_client_that_has_gone(late: bool) -> None:
    async def send(message: Message) -> None:
        if late:
            await asyncio.sleep(0.001)
        raise OSError("closed")

    async def main() -> None:
        with pytest.raises(ClientGoneError):
            await exchange(send, 20).write(b"x")

    asyncio.run(main())
