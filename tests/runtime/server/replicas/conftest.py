"""Replicas that do what a test has written down."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.runtime.server.replicas.messages import Forwarded, Piece

Step = Piece | Exception | asyncio.Event


@dataclass
class ScriptedFleet:
    """Each request takes the next script: pieces it gives, errors it raises, events it waits for.
    The last script is taken again."""

    scripts: list[Sequence[Step]]
    sent: list[Forwarded] = field(default_factory=list)
    ended: int = 0
    closed: int = 0
    count: int = 2
    lost: bool = False
    may_start: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None
    by_prefix: bool = False

    def start(self) -> None:
        self.may_start.wait(10)
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self.closed += 1

    def running(self) -> int:
        if self.lost:
            raise TrtllmLiteError("nobody looks after the replicas")
        return self.count

    async def send(self, request: Forwarded) -> AsyncGenerator[Piece, None]:
        self.sent.append(request)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.ended += 1

    async def metrics(self) -> Mapping[str, bytes]:
        text = b'# HELP n_total N.\n# TYPE n_total counter\nn_total{a="b"} %d\n'
        return {"one": text % 1, "two": text % 2}


@pytest.fixture
def fleet_of() -> Callable[..., ScriptedFleet]:
    """Makes a fleet that has started and follows these scripts."""

    def make(*scripts: Sequence[Step]) -> ScriptedFleet:
        fleet = ScriptedFleet(list(scripts))
        fleet.may_start.set()
        return fleet

    return make
