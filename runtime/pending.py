"""An answer that another thread will give."""

import threading
from collections.abc import Callable, Generator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

INTERRUPT_SECONDS = 0.2


class Bell:
    """Rung by one thread, waited for by another; each ring is heard once. Safe under Ctrl-C, which
    `threading.Event` is not: an interrupt inside the Python code of its condition can leave the
    lock held, and the thread that rings would then wait for ever. Here all locks are C code's.
    """

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        self._rings.put(None)

    def wait(self) -> None:
        """In slices: a signal that arrives just before the wait begins does not end it, and would
        go unnoticed as long as it lasts."""
        while True:
            try:
                return self._rings.get(timeout=INTERRUPT_SECONDS)
            except Empty:
                continue


class Pending(Generic[T]):
    """Given once, by `set` or `fail`; read by `result`, which waits, or by `await`.

    What `concurrent.futures.Future` does, but safe under Ctrl-C: see `Bell`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._wake: Callable[[], object] | None = None

    def set(self, value: T) -> None:
        """Give the answer."""
        self._finish(value, None)

    def fail(self, error: Exception) -> None:
        """Give an error, which is raised where the answer is read."""
        self._finish(None, error)

    def result(self) -> T:
        """The answer, waiting for it."""
        bell = Bell()
        self._when_done(bell.ring)
        bell.wait()
        return self._read()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        # Whoever awaits has imported it; importing it costs every other user of an LLM time.
        import asyncio

        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        self._when_done(lambda: loop.call_soon_threadsafe(woken.set))
        await woken.wait()
        return self._read()

    def _finish(self, value: T | None, error: Exception | None) -> None:
        with self._lock:
            self._done, self._value, self._error = True, value, error
            wake = self._wake
        if wake is not None:
            self._call(wake)

    def _when_done(self, wake: Callable[[], object]) -> None:
        with self._lock:
            self._wake = wake
            done = self._done
        if done:
            self._call(wake)

    def _call(self, wake: Callable[[], object]) -> None:
        try:
            wake()
        except RuntimeError:
            # The event loop of the reader is closed: nobody is left to be told.
            self._wake = None

    def _read(self) -> T:
        if self._error is not None:
            raise self._error
        value: Any = self._value
        result: T = value
        return result
