"""One replica: an engine of its own, and the server's routes over it, called without a socket."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Message

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import EngineDeadError
from trtllm_lite.runtime.server.app import create_app
from trtllm_lite.runtime.server.replicas.messages import Forwarded, Piece, joined
from trtllm_lite.runtime.server.replicas.numbers import write_numbers
from trtllm_lite.runtime.server.service import ModelCard, Service
from trtllm_lite.runtime.server.settings import ServerConfig

Opener = Callable[[], Sequence[tuple[AsyncLLM, ModelCard]]]

MOST_WAITING = 256
"""Messages that an answer may be ahead of the one who takes them."""


@dataclass(frozen=True)
class ReplicaPlan:
    """What a replica is made of. `open` runs in the replica's process; `config` has no keys, which
    the front looks at; `version` is this package's; `numbers` is where a replica tells its numbers,
    in a file named after its process."""

    open: Opener
    config: ServerConfig
    version: str
    numbers: Path | None = None
    end: Callable[[], None] | None = None
    """Called when an engine has died or hangs: whoever looks after replicas should lose this one,
    not send it more requests, which it would refuse faster than sound ones answer theirs."""


class Replica:
    """Opens its models when it is made, which blocks. Raises what `plan.open` raises."""

    def __init__(self, plan: ReplicaPlan) -> None:
        self._numbers = plan.numbers
        self._end = plan.end or (lambda: None)
        self._service = Service(plan.config)
        self._llms: list[AsyncLLM] = []
        for llm, card in plan.open():
            self._service.ready(llm, card)
            self._llms.append(llm)
        self._app = create_app(self._service, plan.version)

    async def serve(self, request: Forwarded) -> AsyncGenerator[Piece, None]:
        """The response to one request. Closing the generator, or cancelling the task that runs it,
        ends the request, as a client that leaves does."""
        outbox = _Outbox(request.body)
        answering = asyncio.ensure_future(
            self._app(request.scope(), outbox.receive, outbox.send),
        )
        answering.add_done_callback(lambda _: outbox.close())
        try:
            async with aclosing(outbox.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            if self._service.died.is_set():
                self._end()

    async def check_health(self) -> None:
        """Tells the numbers of a sound replica. Raises EngineDeadError for an engine that has died,
        TimeoutError for one that hangs."""
        try:
            async with asyncio.timeout(self._service.config.step_timeout):
                for llm in self._llms:
                    await llm.stats()
        except (EngineDeadError, TimeoutError):
            self._end()
            raise
        if self._numbers is not None:
            text = self._service.metrics.text()
            await asyncio.to_thread(write_numbers, self._numbers, str(os.getpid()), text)

    async def close(self) -> None:
        """Free the engines."""
        for llm in self._llms:
            await llm.close()


class _Outbox:
    """Stands in for the connection of one request."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._messages: list[Message] = []
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    async def receive(self) -> Message:
        """The body, and then nothing: a client that leaves cancels the request."""
        body, self._body = self._body, None
        while body is None:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        await self._room.wait()
        self._messages.append(message)
        if len(self._messages) >= MOST_WAITING:
            self._room.clear()
        self._changed.set()

    def close(self) -> None:
        """No more messages will come."""
        self._closed = True
        self._changed.set()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Everything that is sent, as much at once as there is."""
        while self._messages or not self._closed:
            await self._changed.wait()
            self._changed.clear()
            messages, self._messages = self._messages, []
            self._room.set()
            if messages:
                yield joined(messages)
