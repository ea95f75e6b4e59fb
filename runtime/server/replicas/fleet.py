"""What the front asks of the replicas, whoever runs them."""

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from trtllm_lite.runtime.server.replicas.messages import Forwarded, Piece


class ReplicaLostError(Exception):
    """The replica that had the request has died, or cannot be reached."""


class QueueFullError(Exception):
    """As many requests wait for a replica as may."""


class Fleet(Protocol):
    """Replicas that come back when they die. Methods that are not coroutines block."""

    by_prefix: bool
    """Whether `send` looks at how the text of a request begins."""

    def start(self) -> None:
        """Returns when replicas take requests. Raises TrtllmLiteError when they cannot be made."""

    def close(self) -> None:
        """End all replicas at once. Idempotent."""

    def running(self) -> int:
        """Replicas that take requests now. Raises TrtllmLiteError when nobody looks after them
        any more."""

    def send(self, request: Forwarded) -> AsyncGenerator[Piece, None]:
        """The response of the replica that has least to do. Closing the generator ends the
        request. Raises QueueFullError, ReplicaLostError."""

    async def metrics(self) -> Mapping[str, bytes]:
        """The exposition of each replica's numbers, by the replica's name."""
