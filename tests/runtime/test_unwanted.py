"""A prompt that nobody waits for is not computed to its end, and nobody else is concerned."""

import threading
from collections.abc import Iterable

import pytest

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import F32, FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.engine_thread import Delivery, EngineThread
from trtllm_lite.runtime.errors import RunInterruptedError
from trtllm_lite.runtime.mailbox import WaitingMailbox
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.request_maker import Job
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.unwanted import Unwanted

CONFIG = EngineConfig(4, 64, 32, 256, block_size=4, check_invariants=True)
PATIENCE = 30.0


class Interruptible(FakeSession):
    """Its prefill runs count, and are given up when they were interrupted meanwhile. `meanwhile`
    is called inside each."""

    def __init__(self) -> None:
        super().__init__(SessionOptions(CONFIG.max_num_seqs, CONFIG.capacity))
        self.runs = 0
        self.given_up = 0
        self.interrupted = threading.Event()

    def meanwhile(self) -> None:
        """Nothing."""

    def run(self, batch: Batch) -> F32:
        if batch.phase == "prefill":
            self.runs += 1
            self.interrupted.clear()
            self.meanwhile()
            if self.interrupted.is_set():
                self.given_up += 1
                raise RunInterruptedError("a prefill run was interrupted")
        return super().run(batch)

    def interrupt(self) -> None:
        self.interrupted.set()


class Leaving(Interruptible):
    """While its first prefill runs, somebody does not want these requests any more."""

    def __init__(self, *unwanted: str) -> None:
        super().__init__()
        self.engine = Engine(self, CONFIG, vocab_size=61, eos_token_ids=())
        self._unwanted = unwanted

    def meanwhile(self) -> None:
        if self.runs == 1:
            self.engine.unwanted.add(self._unwanted)
            self.engine.unwanted.give_up()

    def add(self, name: str, prompt: Iterable[int], n: int = 1) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=5, n=n)
        self.engine.add(Request(name, tuple(prompt), params))

    def abort(self, name: str) -> list[TokenEvent]:
        events = self.engine.abort(name)
        self.engine.unwanted.remove([name])
        return events

    def finish(self) -> list[TokenEvent]:
        events = []
        while self.engine.has_unfinished:
            events += self.engine.step()
        return events

    def alone(self, prompt: Iterable[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(5):
            ids.append(int(self.reference(ids).argmax()))
        return ids[-5:]


def test_a_run_for_nobody_is_given_up_and_its_request_is_as_before() -> None:
    session = Leaving("a")
    session.add("a", range(9))
    assert session.engine.step() == []
    assert (session.runs, session.given_up) == (1, 1)
    assert [e.finish_reason for e in session.abort("a")] == ["abort"]
    assert session.engine.stats().slots_used == 0
    # Nothing of it is taken for computed: the same prompt starts from its first token.
    session.add("b", range(9))
    events = session.finish()
    assert events[0].cached_tokens == 0
    assert [e.token_id for e in events] == session.alone(range(9))


def test_nothing_is_run_for_nobody() -> None:
    session = Leaving("a")
    session.add("a", range(9))
    session.engine.step()
    session.engine.step()
    assert session.runs == 1


def test_all_choices_of_a_prompt_leave_together() -> None:
    session = Leaving("a")
    session.add("a", range(9), n=3)
    session.engine.step()
    assert session.given_up == 1
    assert len(session.abort("a")) == 3
    assert not session.engine.has_unfinished


def test_a_run_that_others_need_goes_on() -> None:
    session = Leaving("a")
    session.add("a", range(8))
    session.add("b", range(20, 28))
    session.engine.step()
    assert (session.runs, session.given_up) == (1, 0)
    session.abort("a")
    tokens = [e.token_id for e in session.finish() if e.request_id == "b"]
    assert tokens == session.alone(range(20, 28))[1:]


def test_a_run_that_was_interrupted_by_mistake_is_run_again() -> None:
    class Mistaken(Leaving):
        def meanwhile(self) -> None:
            if self.runs == 1:
                self.interrupt()

    session = Mistaken()
    session.add("a", range(9))
    tokens = [e.token_id for e in session.finish()]
    assert (session.runs, session.given_up) == (2, 1)
    assert tokens == session.alone(range(9))


def test_an_id_may_come_again_after_its_abort() -> None:
    session = Leaving("a")
    session.add("a", range(9))
    session.engine.step()
    session.abort("a")
    session.add("a", range(9))
    assert [e.token_id for e in session.finish()] == session.alone(range(9))


@pytest.mark.parametrize("how", ["abort", "abort_soon"])
def test_the_thread_of_an_engine_does_not_wait_for_an_aborted_prompt(how: str) -> None:
    """The run would last for ever."""

    class Endless(Interruptible):
        def __init__(self) -> None:
            super().__init__()
            self.entered = threading.Event()

        def meanwhile(self) -> None:
            self.entered.set()
            assert self.interrupted.wait(PATIENCE)

    session = Endless()
    thread = EngineThread(Engine(session, CONFIG, vocab_size=61, eos_token_ids=()), None)
    mailbox = WaitingMailbox()
    job = Job(Request("a", (1, 2, 3), SamplingParams()), None)
    thread.submit([Delivery(job, mailbox)]).result()
    assert session.entered.wait(PATIENCE)
    getattr(thread, how)(["a"])
    assert mailbox.wait().outputs[0].finish_reason == "abort"
    assert thread.stats().result().slots_used == 0
    thread.close()


def test_an_engine_thread_serves_an_id_again_after_its_abort() -> None:
    """Its runs are not taken for runs for nobody."""
    session = Interruptible()
    thread = EngineThread(Engine(session, CONFIG, vocab_size=61, eos_token_ids=()), None)
    thread.abort(["a"]).result()
    job = Job(Request("a", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=2)), None)
    thread.submit([Delivery(job, WaitingMailbox())]).result()
    # Between two steps: the first one has run, or been left out.
    while thread.stats().result().steps == 0:
        pass
    assert session.runs == 1
    thread.close()


def test_nobody_is_not_everybody() -> None:
    interrupted: list[int] = []
    unwanted = Unwanted(lambda: interrupted.append(1))
    unwanted.add(["a"])
    unwanted.give_up()
    assert not interrupted
    assert not unwanted.covers(frozenset())
