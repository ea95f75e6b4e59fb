"""Distributions of step times: buckets as Prometheus counts them, gaps as readers see them."""

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.plan import PlanRow, StepPlan
from trtllm_lite.runtime.request import Request, Sequence
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.step_tally import STEP_BOUNDS, StepTally, Tally

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4)
values = st.one_of(st.floats(0, 20), st.sampled_from(STEP_BOUNDS))


@given(st.lists(st.tuples(values, st.integers(1, 9)), max_size=30))
def test_a_value_is_counted_in_the_first_bucket_that_has_room(
    added: list[tuple[float, int]],
) -> None:
    tally = Tally()
    for value, times in added:
        tally.add(value, times)
    counts, ends = tally.counts(), (*STEP_BOUNDS, float("inf"))
    assert len(counts) == len(ends)
    for index, end in enumerate(ends):
        assert sum(counts[: index + 1]) == sum(n for value, n in added if value <= end)
    assert tally.sum == pytest.approx(sum(value * n for value, n in added))


def plan_of(decode: int, prefill: int) -> StepPlan:
    sequence = Sequence(Request("r", (1,), PARAMS), 0, [1], 9)
    rows = (PlanRow(sequence, 0, 0, 1, 1),)
    return StepPlan((), rows * decode, rows * prefill)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(tally: StepTally, clock: Clock, plan: StepPlan, seconds: float) -> None:
    tally.begin()
    tally.planned(plan)
    tally.mark("run")
    clock.now += seconds
    tally.end()


def test_a_gap_is_from_end_to_end_for_every_decoding_row() -> None:
    clock = Clock()
    tally = StepTally(clock)
    run(tally, clock, plan_of(0, 2), 0.5)
    assert sum(tally.gaps.counts()) == 0
    clock.now += 0.25
    run(tally, clock, plan_of(2, 0), 0.5)
    assert (sum(tally.gaps.counts()), tally.gaps.sum) == (2, 1.5)
    run(tally, clock, plan_of(3, 1), 1.0)
    assert (sum(tally.gaps.counts()), tally.gaps.sum) == (5, 4.5)
    found = {phase: (sum(t.counts()), t.sum) for phase, t in tally.phases.items()}
    assert found == {"decode": (1, 0.5), "prefill": (1, 0.5), "mixed": (1, 1.0)}


def test_steps_without_rows_or_without_an_end_are_not_counted() -> None:
    clock = Clock()
    tally = StepTally(clock)
    run(tally, clock, plan_of(0, 0), 1.0)
    tally.begin()
    tally.planned(plan_of(1, 0))
    tally.begin()
    tally.end()
    assert sum(sum(t.counts()) for t in tally.phases.values()) == 0


def test_the_first_step_that_is_seen_tells_no_gap() -> None:
    clock = Clock()
    tally = StepTally(clock)
    run(tally, clock, plan_of(1, 0), 1.0)
    assert sum(tally.gaps.counts()) == 0
    assert sum(tally.phases["decode"].counts()) == 1


def steps(engine: Engine) -> Iterator[None]:
    while engine.has_unfinished:
        engine.step()
        engine.timer.end()
        yield


def test_every_token_but_the_first_of_each_sequence_has_a_gap() -> None:
    config = EngineConfig(4, 64, 16, 256, enable_prefix_caching=False)
    session = FakeSession(SessionOptions(4, config.capacity), vocab_size=61)
    engine = Engine(session, config, vocab_size=61, eos_token_ids=(0,))
    tally = StepTally(map(float, count()).__next__)
    engine.timer = tally
    engine.add(Request("a", (1, 2, 3), PARAMS))
    driving = steps(engine)
    next(driving)
    engine.add(Request("b", (4, 5), PARAMS))
    assert list(driving) == [None] * 4
    assert sum(tally.gaps.counts()) == 2 * (4 - 1)
    found = {phase: sum(t.counts()) for phase, t in tally.phases.items()}
    assert found == {"decode": 3, "prefill": 1, "mixed": 1}
