"""What is measured, and what a worker's answer says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["start", "stream", "batch"]


@dataclass(frozen=True)
class Turn:
    """One measurement of one contender: a fresh process until its first token ("start"), one
    request ("stream"), or several at once ("batch"). `repeats` in each round."""

    kind: Kind
    prompt: int
    new: int
    requests: int = 1
    repeats: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind} {self.requests}x{self.prompt}+{self.new}"


# One request at a time.
ONE = (
    Turn("start", 32, 1),
    Turn("stream", 128, 64, repeats=2),
    Turn("stream", 512, 1, repeats=2),
    Turn("stream", 1024, 64),
)

# All requests at once.
MANY = tuple(Turn("batch", 128, 64, requests) for requests in (4, 8, 16))

MAX_LEN = 1280
SLOTS = 16


@dataclass(frozen=True)
class Sample:
    """What one turn gave. `values` by metric name: seconds, or tokens per second. `others` and
    `steal` are shares of all CPUs; a turn that was not quiet is not `kept`."""

    contender: str
    turn: str
    round: int
    attempt: int
    values: Mapping[str, float]
    others: float
    steal: float
    load_average: float
    kept: bool


def stream_values(turn: Turn, times: Sequence[float]) -> dict[str, float]:
    """Time to the first token, and tokens per second after it."""
    values = {f"ttft_{turn.prompt}": times[0]}
    if len(times) > 1:
        values[f"decode_{turn.prompt}"] = (len(times) - 1) / (times[-1] - times[0])
    return values


def batch_values(turn: Turn, reply: Mapping[str, Any]) -> dict[str, float]:
    """New tokens per second over all requests, prefill included."""
    return {f"total_{turn.requests}": turn.requests * turn.new / reply["seconds"]}


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The contenders' order in a round: each is the first of another one."""
    shift = by % len(names) if names else 0
    return [*names[shift:], *names[:shift]]
