"""The results of one request as an async iterator."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from trtllm_lite.runtime.doorbell import Doorbell
from trtllm_lite.runtime.engine_thread import Delivery, EngineThread
from trtllm_lite.runtime.mailbox import Mailbox
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.request_maker import Job


class RequestStream:
    """Iterates over growing results of one request; the last one is `finished`.

    A reader slower than the engine misses nothing: what it has not taken is merged into one
    result. Cancelling the task that reads, and dropping the stream, end the request. For one
    reader, in the event loop that submitted it. Comes from `AsyncLLM.submit`.
    """

    def __init__(self, thread: EngineThread, job: Job, doorbell: Doorbell) -> None:
        self.request_id = job.request.id
        self._thread = thread
        self._job = job
        self._ended = True
        self._arrived = asyncio.Event()
        self._waker = _Waker(doorbell, self._arrived.set)
        self._mailbox = Mailbox(self._waker)

    async def start(self, *, final_only: bool = False) -> None:
        """Submit the request. Raises RequestError when it can never be served."""
        self._ended = False
        delivery = Delivery(self._job, self._mailbox, final_only)
        try:
            await self._thread.submit([delivery])
        except BaseException:
            self._drop()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Waits for the next result. Raises EngineDeadError when there never will be one."""
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await self._next()
        except BaseException:
            self._drop()
            raise
        self._ended = output.finished
        return output

    def on_arrival(self, call: Callable[[], None]) -> None:
        """For a reader of several streams, in place of iterating: `call` is called in the event
        loop whenever there may be something to `take`, and now. It must not hold the stream."""
        self._waker.answer = call
        call()

    def take(self) -> RequestOutput | None:
        """The newest result; None when there is no new one. Waits for nothing. Raises
        EngineDeadError when there never will be one."""
        try:
            output = self._mailbox.take()
        except BaseException:
            self._ended = True
            raise
        if output is not None:
            self._ended = output.finished
        return output

    async def abort(self) -> None:
        """End the request now; its slots are free when this returns. The reader, if there is one,
        gets a last result with finish_reason "abort"."""
        if not self._ended:
            await self._thread.abort([self.request_id])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._drop()

    def __del__(self) -> None:
        self._drop()

    async def _next(self) -> RequestOutput:
        while True:
            output = self._mailbox.take()
            if output is not None:
                return output
            await self._arrived.wait()
            self._arrived.clear()

    def _drop(self) -> None:
        """End the request without a reader for its last result."""
        if not self._ended:
            self._ended = True
            self._thread.abort_soon([self.request_id])


class _Waker:
    """Has `answer` called in a loop, from another thread. It holds no stream, so that dropping
    the stream is noticed."""

    def __init__(self, doorbell: Doorbell, answer: Callable[[], None]) -> None:
        self.answer = answer
        self._doorbell = doorbell

    def __call__(self) -> None:
        """Raises RuntimeError when the loop is closed."""
        self._doorbell.ring(self.answer)
