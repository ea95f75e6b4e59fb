"""Between the engine thread and one reader of one request: the newest result, and only that.

A slow reader does not make a queue grow: results that it has not taken yet are merged, deltas
joined, so what it reads is complete whatever its pace.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from trtllm_lite.runtime.errors import EngineDeadError
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.pending import Bell


class Mailbox:
    """Holds at most one result. `wake` is called on the engine thread whenever there is something
    to take; what it raises goes to the engine thread, which then ends the request."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._pending: RequestOutput | None = None
        self._error: str | None = None

    def put(self, output: RequestOutput) -> None:
        with self._lock:
            waiting = self._pending
            self._pending = output if waiting is None else merge(waiting, output)
        if waiting is None:
            self._wake()

    def fail(self, error: str) -> None:
        """No result will come any more. One that waits can still be taken."""
        with self._lock:
            self._error = error
        self._wake()

    def take(self) -> RequestOutput | None:
        """The newest result, or None when there is no new one. Raises EngineDeadError when there
        never will be."""
        with self._lock:
            output, self._pending = self._pending, None
            if output is None and self._error is not None:
                raise EngineDeadError(self._error)
        return output


class WaitingMailbox(Mailbox):
    """A mailbox whose reader is a thread that waits."""

    def __init__(self) -> None:
        self._arrived = Bell()
        super().__init__(self._arrived.ring)

    def wait(self) -> RequestOutput:
        """The next result, waiting for it. Raises EngineDeadError when there never will be one."""
        while True:
            output = self.take()
            if output is not None:
                return output
            self._arrived.wait()


def merge(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """`newer`, whose deltas also tell what was new in `older`."""
    pairs = zip(older.outputs, newer.outputs, strict=True)
    return replace(newer, outputs=[replace(b, delta=a.delta + b.delta) for a, b in pairs])
