"""What the engine tells about the time of its steps, with a clock that counts its own readings."""

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.loading import Parts
from trtllm_lite.runtime.plan import PlanRow, StepPlan
from trtllm_lite.runtime.request import Request, Sequence
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.step_timer import (
    PARTS,
    NullTimer,
    Part,
    StepRecorder,
    StepTimer,
    StepTimes,
)

VOCAB = 61
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3)


class Told:
    """A timer that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def mark(self, part: Part) -> None:
        self.calls.append(part)

    def planned(self, plan: StepPlan) -> None:
        self.calls.append("planned")

    def end(self) -> None:
        self.calls.append("end")


def make_engine() -> Engine:
    config = EngineConfig(4, 64, 16, 256, enable_prefix_caching=False)
    session = FakeSession(SessionOptions(4, config.capacity), vocab_size=VOCAB)
    return Engine(session, config, vocab_size=VOCAB, eos_token_ids=(0,))


def plan_of(decode: list[int], prefill: list[int]) -> StepPlan:
    """A plan with rows of so many tokens."""
    sequence = Sequence(Request("r", (1,), PARAMS), 0, [1], 9)
    rows = [PlanRow(sequence, 0, 0, n, n) for n in (*decode, *prefill)]
    return StepPlan((), tuple(rows[: len(decode)]), tuple(rows[len(decode) :]))


@given(
    st.lists(st.tuples(st.sampled_from(PARTS), st.floats(0, 1e3)), max_size=20),
    st.floats(0, 1e3),
    st.lists(st.integers(1, 9), max_size=3),
    st.lists(st.integers(1, 9), max_size=3),
)
def test_parts_add_up_to_the_whole_step(
    marks: list[tuple[Part, float]], rest: float, decode: list[int], prefill: list[int]
) -> None:
    now = 5.0
    recorder = StepRecorder(lambda: now)
    recorder.begin()
    recorder.planned(plan_of(decode, prefill))
    for part, seconds in marks:
        now += seconds
        recorder.mark(part)
    now += rest
    recorder.end()
    if not decode and not prefill:
        assert recorder.steps == []
        return
    (step,) = recorder.steps
    assert step.total == pytest.approx(now - 5.0)
    for part in PARTS:
        spent = sum(seconds for name, seconds in marks if name == part)
        assert step.of(part) == pytest.approx(spent + (rest if part == "output" else 0.0))
    assert step.overhead == pytest.approx(step.total - step.of("run"))
    assert (step.decode_rows, step.prefill_rows) == (len(decode), len(prefill))
    assert (step.decode_tokens, step.prefill_tokens) == (sum(decode), sum(prefill))


@pytest.mark.parametrize(
    ("decode", "prefill", "phase"), [(2, 0, "decode"), (0, 1, "prefill"), (1, 3, "mixed")]
)
def test_a_phase_is_what_ran(decode: int, prefill: int, phase: str) -> None:
    assert StepTimes(decode, decode, prefill, prefill, (0.0,) * len(PARTS)).phase == phase


def test_a_step_that_did_not_end_is_not_counted_to_the_next_one() -> None:
    recorder = StepRecorder(map(float, count()).__next__)
    recorder.begin()
    recorder.planned(plan_of([1, 1], []))
    recorder.mark("run")
    recorder.begin()
    recorder.planned(plan_of([1], []))
    recorder.end()
    (step,) = recorder.steps
    assert step.decode_rows == 1
    assert step.of("run") == 0.0
    assert step.total == 1.0


def test_the_engine_tells_of_every_part_in_order() -> None:
    engine, told = make_engine(), Told()
    engine.timer = told
    engine.add(Request("a", (1, 2, 3), PARAMS))
    engine.step()
    parts = ["plan", "memory", "batch", "run", "sample", "apply", "memory"]
    assert [call for call in told.calls if call != "planned"] == ["begin", *parts]


def test_a_run_is_told_of_for_each_batch_and_even_if_it_fails() -> None:
    engine, told = make_engine(), Told()
    engine.add(Request("a", (1, 2, 3), PARAMS))
    engine.step()
    engine.add(Request("b", (4, 5), PARAMS))
    engine.timer = told
    engine.step()
    assert told.calls.count("run") == 2


def steps_of_two_requests() -> Iterator[StepTimes]:
    """One that decodes while the other comes in; every reading of the clock is a second later."""
    engine, recorder = make_engine(), StepRecorder(map(float, count()).__next__)
    engine.timer = recorder
    engine.add(Request("a", (1, 2, 3), PARAMS))
    engine.step()
    recorder.end()
    engine.add(Request("b", (4, 5), PARAMS))
    while engine.has_unfinished:
        engine.step()
        recorder.end()
    yield from recorder.steps


def test_steps_of_an_engine() -> None:
    steps = list(steps_of_two_requests())
    assert [s.phase for s in steps] == ["prefill", "mixed", "decode", "decode"]
    assert [(s.decode_rows, s.prefill_tokens) for s in steps] == [(0, 3), (1, 2), (2, 0), (1, 0)]
    for step in steps:
        assert all(step.of(part) > 0.0 for part in PARTS)
        runs = 2 if step.phase == "mixed" else 1
        assert step.of("run") == runs
        assert step.total == 6 + 2 * runs


@pytest.mark.parametrize("timer", [NullTimer(), StepRecorder(), Told()])
def test_tokens_do_not_depend_on_the_timer(timer: StepTimer) -> None:
    def tokens(chosen: StepTimer) -> list[int | None]:
        engine = make_engine()
        engine.timer = chosen
        engine.add(Request("a", (1, 2, 3), PARAMS))
        return [event.token_id for _ in range(3) for event in engine.step()]

    assert tokens(timer) == tokens(NullTimer())


def test_an_llm_reports_whole_steps_until_it_is_told_to_stop() -> None:
    engine = make_engine()
    config = EngineConfig(4, 64, 16, 256, enable_prefix_caching=False)
    with LLM.from_parts(Parts(engine, config, None, PARAMS)) as llm:
        told, recorder = Told(), StepRecorder()
        llm.time_steps(recorder)
        llm.generate(prompt_token_ids=[[1, 2, 3], [4, 5]])
        llm.time_steps(told)
        assert [s.phase for s in recorder.steps] == ["prefill", "decode", "decode"]
        assert all(s.of("output") > 0.0 for s in recorder.steps)
        llm.generate(prompt_token_ids=[[1, 2, 3]])
        llm.time_steps(NullTimer())
        assert told.calls.count("begin") == told.calls.count("end") == 3
        assert len(recorder.steps) == 3
        llm.generate(prompt_token_ids=[[1, 2, 3]])
    assert told.calls.count("end") == 3
