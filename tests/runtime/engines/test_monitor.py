"""A build is followed, and stopped by whatever ends the wait for it."""

import threading
from typing import Any

import pytest

from trtllm_lite.runtime.engines.monitor import Watch, watched


class Module:
    """As much of TensorRT as a monitor needs."""

    class IProgressMonitor:
        pass


class Heard:
    """Keeps what is reported; raises at the first report when told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.amounts: list[int] = []
        self._error = error

    def step(self, name: str) -> None:
        raise AssertionError(name)

    def note(self, text: str) -> None:
        raise AssertionError(text)

    def advance(self, done: int, total: int, unit: str) -> None:
        assert total == 100
        self.amounts.append(done)
        if self._error is not None:
            raise self._error


def test_nested_phases_are_parts_of_their_step() -> None:
    watch = Watch()
    watch.start("build", None, 2)
    assert watch.fraction == 0.0
    watch.start("tactics", "build", 4)
    watch.step("tactics", 0)
    assert watch.fraction == pytest.approx(1 / 8)
    watch.start("node", "tactics", 10)
    watch.step("node", 4)
    assert watch.fraction == pytest.approx((1 + 0.5) / 8)
    watch.finish("node")
    watch.step("tactics", 3)
    watch.finish("tactics")
    watch.step("build", 0)
    assert watch.fraction == pytest.approx(1 / 2)
    watch.step("build", 1)
    assert watch.fraction == 1.0


def test_a_fraction_never_falls() -> None:
    watch = Watch()
    watch.start("build", None, 1)
    watch.start("again", "build", 2)
    watch.step("again", 0)
    assert watch.fraction == pytest.approx(1 / 2)
    watch.finish("again")
    watch.start("again", "build", 2)
    assert watch.fraction == pytest.approx(1 / 2)


def test_unknown_phases_and_none_at_all_are_nothing() -> None:
    watch = Watch()
    assert watch.step("never begun", 3)
    watch.finish("never begun")
    assert watch.fraction == 0.0


def test_the_result_comes_back_and_progress_is_told() -> None:
    told = threading.Event()

    class Waiting(Heard):
        def advance(self, done: int, total: int, unit: str) -> None:
            super().advance(done, total, unit)
            told.set()

    def build(monitor: Any) -> str:
        monitor.phase_start("build", None, 4)
        assert monitor.step_complete("build", 0) is True
        assert told.wait(30)
        return "plan"

    heard = Waiting()
    assert watched(Module, build, heard) == "plan"
    assert heard.amounts[0] in (0, 25)
    assert set(heard.amounts) <= {0, 25}


def test_an_interrupt_stops_the_build_at_its_next_step() -> None:
    steps: list[bool] = []

    def build(monitor: Any) -> None:
        monitor.phase_start("build", None, 10**9)
        while not steps or steps[-1]:
            steps.append(monitor.step_complete("build", len(steps)))

    with pytest.raises(KeyboardInterrupt):
        watched(Module, build, Heard(KeyboardInterrupt()))
    # It came back: the thread is not left running, because it was told to stop.
    assert steps[-1] is False


def test_an_error_of_the_build_is_raised() -> None:
    def build(monitor: Any) -> None:
        raise RuntimeError("no plan")

    with pytest.raises(RuntimeError, match="no plan"):
        watched(Module, build, Heard())
