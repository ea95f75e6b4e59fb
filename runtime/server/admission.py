"""Who is let in: a bounded number of sequences, and nobody but while the server is ready."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from trtllm_lite.runtime.server.errors import unavailable
from trtllm_lite.runtime.server.metrics import Metrics

QUEUE_RETRY_SECONDS = 1


class Admission:
    """Counts the sequences (prompts times n) of the requests inside. For one event loop.

    Invariant: at most `limit` sequences are inside, or those of one request alone, which may be
    larger: it runs in turns.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self.limit = limit
        self.sequences = 0
        self.requests = 0
        self.empty = asyncio.Event()
        """Set while nobody is inside."""
        self.empty.set()
        self._metrics = metrics

    @contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        """Inside for the length of the block. Raises ApiError 503 when there is no room."""
        if self.sequences and self.sequences + sequences > self.limit:
            self._metrics.rejected("queue_full")
            message = f"the queue is full: {self.sequences} sequences of at most {self.limit}"
            raise unavailable(message, "queue_full", QUEUE_RETRY_SECONDS)
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
