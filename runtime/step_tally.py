"""How long steps take, counted into buckets: a timer that a server can always afford."""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import get_args

from trtllm_lite.runtime.plan import StepPlan
from trtllm_lite.runtime.step_timer import Part, StepPhase

STEP_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
"""Seconds: from a small model's step to one that a watchdog is about to end."""


class Tally:
    """Values counted into buckets; `bounds` are their upper ends, included, and one more bucket
    has what is above. One thread adds, any thread reads, and neither waits: what is read is a
    state that was there, but for a sum that may have one value more or less."""

    def __init__(self, bounds: Sequence[float] = STEP_BOUNDS) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, as if it had been added so often."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def counts(self) -> tuple[int, ...]:
        """Of each bucket, lowest first."""
        return tuple(self._counts)


class StepTally:
    """A `StepTimer` that keeps distributions only, in a microsecond a step.

    phases: seconds of whole steps, delivery of their results included. gaps: seconds between two
    tokens of one sequence, once for every decoding row of every step: a decoding row had its last
    token from the step before, so the time between the ends of the two is what its reader waits.
    Tokens that speculation adds to a step count as part of it, as in vLLM.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.phases: dict[StepPhase, Tally] = {phase: Tally() for phase in get_args(StepPhase)}
        self.gaps = Tally()
        self._clock = clock
        self._plan: StepPlan | None = None
        self._begun = 0.0
        self._ended: float | None = None

    def begin(self) -> None:
        self._plan = None
        self._begun = self._clock()

    def mark(self, part: Part) -> None:
        """Parts are not told apart."""

    def planned(self, plan: StepPlan) -> None:
        self._plan = plan

    def end(self) -> None:
        plan, self._plan = self._plan, None
        if plan is None or not (plan.decode or plan.prefill):
            return
        now, before = self._clock(), self._ended
        if plan.decode and before is not None:
            self.gaps.add(now - before, len(plan.decode))
        self._ended = now
        self.phases[_phase(plan)].add(now - self._begun)


def _phase(plan: StepPlan) -> StepPhase:
    if plan.decode and plan.prefill:
        return "mixed"
    return "prefill" if plan.prefill else "decode"
