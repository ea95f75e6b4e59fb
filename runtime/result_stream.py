"""The results of one request as an iterator for a thread that waits for them."""

from types import TracebackType
from typing import Self

from trtllm_lite.runtime.engine_thread import Delivery, EngineThread
from trtllm_lite.runtime.mailbox import WaitingMailbox
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.request_maker import Job


class ResultStream:
    """Iterates over growing results; the last one is `finished`.

    Making it submits the request: raises RequestError when it can never be served. `close`, an
    exception while waiting (Ctrl-C too) and dropping the stream all end the request.
    """

    def __init__(self, thread: EngineThread, job: Job) -> None:
        self.request_id = job.request.id
        self._thread = thread
        self._mailbox = WaitingMailbox()
        self._ended = False
        try:
            thread.submit([Delivery(job, self._mailbox)]).result()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        """Waits for the next result. Raises EngineDeadError when there never will be one."""
        if self._ended:
            raise StopIteration
        try:
            output = self._mailbox.wait()
        except BaseException:
            self.close()
            raise
        self._ended = output.finished
        return output

    def close(self) -> None:
        """End the request, if it has not ended. No further results. Idempotent."""
        if not self._ended:
            self._ended = True
            self._thread.abort_soon([self.request_id])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
