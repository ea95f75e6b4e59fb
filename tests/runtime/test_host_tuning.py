"""The pick, on machines that are drawn: clocks and loops made here."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.runtime.host_tuning import (
    BUDGET_S,
    MARGIN,
    Setting,
    Tuning,
    candidates,
    from_json,
    measure,
    to_json,
)

DEFAULT = Setting(4)


class Machine:
    """Runs loops whose steps take `cost(setting)` seconds of its clock, `noise` times more or
    less. Loops count when they are opened and closed."""

    def __init__(
        self, cost: Callable[[Setting], float], noise: Callable[[], float] = lambda: 1.0
    ) -> None:
        self.cost = cost
        self.noise = noise
        self.now = 0.0
        self.open_cost = 0.0
        self.opened: list[Setting] = []
        self.order: list[Setting] = []
        self.closed = 0

    def open(self, setting: Setting) -> "DrawnLoop":
        self.opened.append(setting)
        self.now += self.open_cost
        return DrawnLoop(self, setting)

    def clock(self) -> float:
        return self.now

    def measure(self, *settings: Setting) -> Tuning:
        return measure(settings, self.open, clock=self.clock, spent=self.clock)


class DrawnLoop:
    def __init__(self, machine: Machine, setting: Setting) -> None:
        self.machine = machine
        self.setting = setting

    def step(self) -> None:
        self.machine.order.append(self.setting)
        self.machine.now += self.machine.cost(self.setting) * self.machine.noise()

    def close(self) -> None:
        self.machine.closed += 1


def test_a_clear_gain_is_picked() -> None:
    fewer = Setting(2)
    machine = Machine(lambda s: 0.005 if s == fewer else 0.006)
    tuning = machine.measure(DEFAULT, fewer, Setting(4, "off"))
    assert tuning.setting == fewer
    assert tuning.origin == "measured"
    assert [s for s, _ in tuning.step_s] == [DEFAULT, fewer, Setting(4, "off")]
    assert dict(tuning.step_s)[fewer] == pytest.approx(0.005)
    assert machine.closed == 3


def test_the_default_stays_within_the_margin() -> None:
    better = 0.010 * (1 - MARGIN) * 1.01
    machine = Machine(lambda s: better if s.threads == 2 else 0.010)
    assert machine.measure(DEFAULT, Setting(2)).setting == DEFAULT


def test_a_private_copy_of_the_weights_has_to_gain_more() -> None:
    huge = replace(DEFAULT, huge_pages=True)
    gain = {False: 0.010, True: 0.010 * 0.85}
    assert Machine(lambda s: gain[bool(s.huge_pages)]).measure(DEFAULT, huge).setting == DEFAULT
    gain[True] = 0.010 * 0.7
    assert Machine(lambda s: gain[bool(s.huge_pages)]).measure(DEFAULT, huge).setting == huge


@given(st.integers(0, 2**32), st.floats(0.1, 20))
def test_noise_alone_never_leaves_the_default(seed: int, spread: float) -> None:
    """Steps that cost the same, half of them stretched by other work."""
    rng = random.Random(seed)
    machine = Machine(
        lambda _: 0.005, lambda: 1 + (rng.random() < 0.5) * rng.expovariate(1) * spread
    )
    settings = (DEFAULT, Setting(2), Setting(4, "off"), Setting(4, "long"))
    assert machine.measure(*settings).setting == DEFAULT


def test_one_lucky_turn_is_not_enough() -> None:
    """A setting whose fastest step is faster, and whose typical one is slower."""
    luck = iter([1.0, *[0.5] * 4, *[3.0] * 1000])
    machine = Machine(lambda s: 0.005 * (next(luck) if s.threads == 2 else 1.0))
    tuning = machine.measure(DEFAULT, Setting(2))
    assert dict(tuning.step_s)[Setting(2)] < 0.005
    assert tuning.setting == DEFAULT


def test_settings_take_turns() -> None:
    machine = Machine(lambda _: 0.001)
    machine.measure(DEFAULT, Setting(2))
    half = len(machine.order) // 2
    assert set(machine.order[:half]) == set(machine.order[half:]) == {DEFAULT, Setting(2)}


def test_the_time_is_bounded() -> None:
    machine = Machine(lambda _: BUDGET_S / 4)
    machine.open_cost = BUDGET_S
    machine.measure(DEFAULT, Setting(2), Setting(3), Setting(1))
    assert machine.opened == [DEFAULT, Setting(2)]
    turns = (machine.now - 2 * BUDGET_S) / machine.cost(DEFAULT)
    assert turns < 10


@pytest.mark.parametrize("answers", [[0.9], [0.0, 0.9]])
def test_beside_other_work_nothing_is_picked(answers: list[float]) -> None:
    machine = Machine(lambda s: 0.001 if s.threads == 2 else 0.006)
    shares = iter(answers)
    tuning = measure(
        (DEFAULT, Setting(2)),
        machine.open,
        clock=machine.clock,
        spent=machine.clock,
        others=lambda: next(shares),
    )
    assert tuning == Tuning(DEFAULT, "busy")
    assert machine.closed == len(machine.opened)


def test_loops_are_closed_when_a_step_fails() -> None:
    def cost(setting: Setting) -> float:
        if setting.threads == 2:
            raise ValueError("no such setting")
        return 0.001

    machine = Machine(cost)
    with pytest.raises(ValueError, match="no such setting"):
        machine.measure(DEFAULT, Setting(2))
    assert machine.closed == 2


def test_candidates_begin_with_the_default_and_fit_the_machine() -> None:
    for cores in (1, 2, 3, 8, 64):
        offered = candidates(cores)
        assert offered[0] == Setting(cores)
        assert len(set(offered)) == len(offered) <= 6
        assert all(1 <= s.threads <= cores for s in offered)
    assert {s.threads for s in candidates(8)} == {8, 7, 4}
    assert {s.spin for s in candidates(2)} == {"off", "brief", "long"}
    assert {s.spin for s in candidates(1)} == {"brief"}


def test_what_is_remembered_comes_back_for_the_same_machine_only() -> None:
    setting = Setting(3, "off", huge_pages=True)
    record = to_json(Tuning(setting, "measured", ((setting, 0.1),)), 4, "cpu 1.32")
    assert from_json(record, 4, "cpu 1.32") == Tuning(setting, "remembered")
    assert from_json(record, 8, "cpu 1.32") is None
    assert from_json(record, 4, "cpu 1.33") is None
    assert from_json(None, 4, "cpu 1.32") is None


@pytest.mark.parametrize(
    "damage",
    [
        {"threads": 0},
        {"threads": 5},
        {"threads": "2"},
        {"threads": True},
        {"spin": "fast"},
        {"spin": None},
        {"spin": []},
        {"huge_pages": "yes"},
    ],
)
def test_a_damaged_record_is_no_tuning(damage: dict[str, object]) -> None:
    record = to_json(Tuning(Setting(3)), 4, "cpu")
    assert from_json({**record, **damage}, 4, "cpu") is None


def test_private_copies_are_tried_only_where_there_is_room() -> None:
    with_copies, without = candidates(4), candidates(4, private_copies=False)
    assert set(with_copies) - set(without) == {Setting(4, huge_pages=True)}
