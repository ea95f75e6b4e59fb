"""A server on a real socket, over the fake model, for client libraries."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.server.lifecycle import Server
from trtllm_lite.runtime.server.listening import bind, url_of
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import ServerConfig, key_digest

KEY = "key-of-the-test"


@dataclass(frozen=True)
class Site:
    """Where the server is, the key that opens it, and the parts behind it."""

    url: str
    key: str
    llm: AsyncLLM
    session: Any


RunSite = Callable[..., None]


@pytest.fixture
def run_site(new_llm: Callable[..., tuple[AsyncLLM, Any]], card: ModelCard) -> RunSite:
    """Runs a test, an async function of a `Site`, with a server."""

    def run(
        test: Callable[[Site], Coroutine[Any, Any, None]],
        *,
        is_open: bool = True,
        max_queue: int = 8,
        room: int = 64,
        of: ModelCard = card,
    ) -> None:
        async def main() -> None:
            llm, session = new_llm(is_open, room)
            ready = asyncio.Event()
            config = ServerConfig(key_digests=(key_digest(KEY),), max_queue=max_queue)
            server = Server(config, lambda _: (llm, of), lambda _: ready.set(), "9.9")
            sock = bind("127.0.0.1", 0)
            task = asyncio.ensure_future(server.run(sock))
            try:
                await asyncio.wait_for(ready.wait(), 20)
                await asyncio.wait_for(test(Site(url_of(sock), KEY, llm, session)), 60)
            finally:
                session.permits.release(1_000_000)
                assert server.stops is not None
                server.stops.tell()
                server.stops.tell()
                await task

        asyncio.run(main())

    return run
