"""Who is let in: a bounded number of sequences for each model, whatever the other models do."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from trtllm_lite.runtime.server.errors import unavailable
from trtllm_lite.runtime.server.metrics import Metrics

QUEUE_RETRY_SECONDS = 1


class Admission:
    """Counts the sequences (prompts times n) of the requests inside, which are inside of `within`
    as well. For one event loop.

    Invariant: at most `limit` sequences are inside, or those of one request alone, which may be
    larger: it runs in turns. None is no limit.
    """

    def __init__(
        self, limit: int | None, metrics: Metrics, within: "Admission | None" = None
    ) -> None:
        self.limit = limit
        self.sequences = 0
        self.requests = 0
        self.empty = asyncio.Event()
        """Set while nobody is inside."""
        self.empty.set()
        self._metrics = metrics
        self._within = within

    @contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        """Inside for the length of the block. Raises ApiError 503 when there is no room."""
        self._check_room(sequences)
        with ExitStack() as stack:
            if self._within is not None:
                stack.enter_context(self._within.admitted(sequences))
            self.sequences += sequences
            self.requests += 1
            self.empty.clear()
            try:
                yield
            finally:
                self.sequences -= sequences
                self.requests -= 1
                if not self.requests:
                    self.empty.set()

    def _check_room(self, sequences: int) -> None:
        if self.limit is None or not self.sequences or self.sequences + sequences <= self.limit:
            return
        self._metrics.rejected("queue_full")
        message = f"the queue is full: {self.sequences} sequences of at most {self.limit}"
        raise unavailable(message, "queue_full", QUEUE_RETRY_SECONDS)
