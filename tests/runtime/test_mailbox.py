"""One result at most, nothing lost."""

import threading

import pytest

from trtllm_lite.runtime.errors import EngineDeadError
from trtllm_lite.runtime.mailbox import Mailbox, WaitingMailbox
from trtllm_lite.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput


def result(*deltas: str, text: str = "", finished: bool = False) -> RequestOutput:
    choices = [CompletionOutput(i, text, (), delta=delta) for i, delta in enumerate(deltas)]
    return RequestOutput("r", None, (), choices, finished, RequestMetrics(0.0))


def test_results_that_wait_are_merged_into_the_newest() -> None:
    wakes: list[int] = []
    mailbox = Mailbox(lambda: wakes.append(1))
    mailbox.put(result("a", "x", text="a"))
    mailbox.put(result("b", "", text="ab"))
    mailbox.put(result("c", "y", text="abc", finished=True))
    taken = mailbox.take()
    assert taken is not None
    assert [c.delta for c in taken.outputs] == ["abc", "xy"]
    assert taken.outputs[0].text == "abc"
    assert taken.finished
    assert mailbox.take() is None
    assert len(wakes) == 1


def test_after_taking_the_next_result_wakes_again() -> None:
    wakes: list[int] = []
    mailbox = Mailbox(lambda: wakes.append(1))
    for delta in "ab":
        mailbox.put(result(delta))
        taken = mailbox.take()
        assert taken is not None
        assert taken.outputs[0].delta == delta
    assert len(wakes) == 2


def test_what_waits_is_given_before_the_error() -> None:
    mailbox = WaitingMailbox()
    mailbox.put(result("a"))
    mailbox.fail("it died")
    assert mailbox.wait().outputs[0].delta == "a"
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="it died"):
            mailbox.wait()


def test_a_waiting_reader_is_woken_by_results_and_by_the_error() -> None:
    mailbox = WaitingMailbox()
    threading.Timer(0.01, lambda: mailbox.put(result("a"))).start()
    assert mailbox.wait().outputs[0].delta == "a"
    threading.Timer(0.01, lambda: mailbox.fail("it died")).start()
    with pytest.raises(EngineDeadError):
        mailbox.wait()
