"""What is measured, and what a worker's answer says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["start", "stream", "long", "batch"]


@dataclass(frozen=True)
class Turn:
    """One measurement of one contender: a fresh process until its first token ("start"), one
    request ("stream", or "long" where there is room for long prompts), or several at once
    ("batch"). `repeats` in each round."""

    kind: Kind
    prompt: int
    new: int
    requests: int = 1
    repeats: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind} {self.requests}x{self.prompt}+{self.new}"

    @property
    def decodes(self) -> bool:
        """Whether it says how fast a lone request decodes."""
        return self.kind in ("stream", "long") and self.new > 1


@dataclass(frozen=True)
class Part:
    """Turns that the same processes take. `slots` requests at once and `max_len` tokens of one
    request are what each contender is told to make room for. `rounds`: how often all turns are
    taken, where nobody says otherwise."""

    name: str
    turns: tuple[Turn, ...]
    slots: int
    max_len: int
    rounds: int = 2


# One request at a time.
ONE = Part(
    "one",
    (
        Turn("start", 32, 1),
        Turn("stream", 128, 64, repeats=2),
        Turn("stream", 512, 1, repeats=2),
        Turn("stream", 1024, 64),
    ),
    slots=1,
    max_len=1280,
)

# All requests at once.
MANY = Part("many", tuple(Turn("batch", 128, 64, n) for n in (4, 8, 16)), slots=16, max_len=1280)

# Prompts of which attention is the most work. SmolLM2 has 8,192 positions: prompt and answer.
LONG_BASE, LONG_LENGTHS = 1024, (2048, 4096, 8160)
LONG = Part(
    "long",
    tuple(Turn("long", length, 32) for length in (LONG_BASE, *LONG_LENGTHS)),
    slots=1,
    max_len=8192,
    rounds=1,
)

PARTS = {part.name: part for part in (ONE, MANY, LONG)}


@dataclass(frozen=True)
class Sample:
    """What one turn gave. `values` by metric name: seconds, tokens per second, or for the machine
    itself bytes per second. `others` and `steal` are shares of all CPUs; a turn that was not quiet
    is not `kept`."""

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
    """Time to the first token, and tokens per second after it. Those of a long turn have names of
    their own: with more room the same prompt may take another time."""
    head = "long_" if turn.kind == "long" else ""
    values = {f"{head}ttft_{turn.prompt}": times[0]}
    if len(times) > 1:
        values[f"{head}decode_{turn.prompt}"] = (len(times) - 1) / (times[-1] - times[0])
    return values


def batch_values(turn: Turn, reply: Mapping[str, Any]) -> dict[str, float]:
    """New tokens per second over all requests, prefill included."""
    return {f"total_{turn.requests}": turn.requests * turn.new / reply["seconds"]}


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The contenders' order in a round: each is the first of another one."""
    shift = by % len(names) if names else 0
    return [*names[shift:], *names[:shift]]
