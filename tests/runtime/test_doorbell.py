"""Callbacks from another thread: all of them, in order, with one wake-up for those that gather."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from trtllm_lite.runtime.doorbell import Doorbell


def test_rings_that_gather_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop, heard, woken = asyncio.get_running_loop(), list[int](), list[object]()
        original = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *args: Any, **kwargs: Any) -> object:
            woken.append(callback)
            return original(callback, *args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        bell = Doorbell(loop)
        for burst in range(3):
            for number in range(16):
                bell.ring(partial(heard.append, burst * 16 + number))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(woken) == burst + 1
        assert heard == list(range(48))

    asyncio.run(main())


def test_no_ring_of_another_thread_is_lost() -> None:
    async def main() -> None:
        heard = list[int]()
        bell = Doorbell(asyncio.get_running_loop())

        def ring() -> None:
            for number in range(20_000):
                bell.ring(partial(heard.append, number))

        thread = threading.Thread(target=ring)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0)
        thread.join()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert heard == list(range(20_000))

    asyncio.run(main())


def test_a_closed_loop_is_told_to_whoever_rings() -> None:
    loop = asyncio.new_event_loop()
    bell = Doorbell(loop)
    bell.ring(lambda: None)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        bell.ring(lambda: None)
