"""Where the time of a step goes: the seam that an engine reports to, and a recorder for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from trtllm_lite.runtime.plan import StepPlan

Part = Literal["plan", "memory", "batch", "run", "sample", "apply", "output"]
StepPhase = Literal["decode", "prefill", "mixed"]

PARTS: tuple[Part, ...] = ("plan", "memory", "batch", "run", "sample", "apply", "output")
"""plan: which sequences run; memory: slots moved, blocks kept and loaded; batch: the plan as
arrays; run: the session, its checks and bindings included; sample: logits to tokens; apply:
sequences advance and end; output: text and results, and their delivery."""


@dataclass(frozen=True)
class StepTimes:
    """One step: its rows and tokens in either graph, and the seconds of each of `PARTS`, which
    leave out nothing between the step's begin and its end."""

    decode_rows: int
    decode_tokens: int
    prefill_rows: int
    prefill_tokens: int
    seconds: tuple[float, ...]

    @property
    def phase(self) -> StepPhase:
        if self.decode_rows and self.prefill_rows:
            return "mixed"
        return "prefill" if self.prefill_rows else "decode"

    @property
    def total(self) -> float:
        return sum(self.seconds)

    @property
    def overhead(self) -> float:
        """All but the session's run."""
        return self.total - self.of("run")

    def of(self, part: Part) -> float:
        return self.seconds[PARTS.index(part)]


class StepTimer(Protocol):
    """Told of each step by the thread that owns the engine, in this order: `begin`, any number of
    `mark`, `planned` among them, `end`. A step that fails has no `end`."""

    def begin(self) -> None:
        """A step starts."""

    def mark(self, part: Part) -> None:
        """What went on since the last call belonged to `part`."""

    def planned(self, plan: StepPlan) -> None:
        """What the step runs."""

    def end(self) -> None:
        """Its results are delivered."""


class NullTimer:
    """Measures nothing."""

    def begin(self) -> None:
        pass

    def mark(self, part: Part) -> None:
        pass

    def planned(self, plan: StepPlan) -> None:
        pass

    def end(self) -> None:
        pass


class StepRecorder:
    """Keeps the times of every step that ran anything, oldest first, in `steps`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[StepTimes] = []
        self._clock = clock
        self._plan: StepPlan | None = None
        self._last = 0.0
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)

    def begin(self) -> None:
        self._plan = None
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._last = self._clock()

    def mark(self, part: Part) -> None:
        now = self._clock()
        self._seconds[part] += now - self._last
        self._last = now

    def planned(self, plan: StepPlan) -> None:
        self._plan = plan

    def end(self) -> None:
        self.mark("output")
        plan, self._plan = self._plan, None
        if plan is None or not (plan.decode or plan.prefill):
            return
        self.steps.append(
            StepTimes(
                decode_rows=len(plan.decode),
                decode_tokens=sum(row.num_tokens for row in plan.decode),
                prefill_rows=len(plan.prefill),
                prefill_tokens=sum(row.num_tokens for row in plan.prefill),
                seconds=tuple(self._seconds.values()),
            )
        )
