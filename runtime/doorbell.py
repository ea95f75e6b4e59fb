"""Callbacks into an event loop from another thread, with as few wake-ups as can be."""

import asyncio
from collections import deque
from collections.abc import Callable


class Doorbell:
    """Has things called by `loop`, in the order of their rings. The loop is woken by the first of
    the rings that come before it looks: waking it costs a system call, which also lets it take the
    interpreter away from the thread that rings."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._rung: deque[Callable[[], None]] = deque()
        self._woken = False

    def ring(self, answer: Callable[[], None]) -> None:
        """Have `answer` called soon. From any thread. Raises RuntimeError when the loop is
        closed."""
        if self.loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._rung.append(answer)
        if not self._woken:
            self._woken = True
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        # Before the look, not after it: a ring in between wakes the loop once more.
        self._woken = False
        while self._rung:
            self._rung.popleft()()
