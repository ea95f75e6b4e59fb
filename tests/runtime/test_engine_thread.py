"""The thread around an engine: order, isolation of readers, and the end."""

import contextlib
import os
import threading
import warnings

import pytest

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import F32, FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine, EngineStats
from trtllm_lite.runtime.engine_thread import Delivery, EngineThread
from trtllm_lite.runtime.errors import EngineDeadError, RequestError
from trtllm_lite.runtime.mailbox import Mailbox, WaitingMailbox
from trtllm_lite.runtime.outputs import RequestOutput
from trtllm_lite.runtime.pending import Pending
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.request_maker import Job
from trtllm_lite.runtime.sampling_params import SamplingParams

CONFIG = EngineConfig(
    max_num_seqs=2,
    max_model_len=64,
    max_num_batched_tokens=16,
    max_kv_tokens=128,
    check_invariants=True,
)
OPTIONS = SessionOptions(CONFIG.max_num_seqs, CONFIG.capacity)


class GatedSession(FakeSession):
    """A session whose runs wait for `gate`; `entered` tells that one has begun."""

    def __init__(self) -> None:
        super().__init__(OPTIONS)
        self.gate, self.entered = threading.Event(), threading.Event()

    def run(self, batch: Batch) -> F32:
        self.entered.set()
        self.gate.wait()
        return super().run(batch)


class DyingSession(FakeSession):
    """A session that fails in a way that no step isolates."""

    def run(self, batch: Batch) -> F32:
        raise SystemExit("out of order")


def start(session: FakeSession) -> EngineThread:
    engine = Engine(session, CONFIG, vocab_size=session.model.vocab_size, eos_token_ids=())
    return EngineThread(engine, None)


def job(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> Job:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Job(Request(request_id, prompt, params), None)


def deliver(thread: EngineThread, *jobs: Job) -> list[WaitingMailbox]:
    mailboxes = [WaitingMailbox() for _ in jobs]
    pairs = zip(jobs, mailboxes, strict=True)
    thread.submit([Delivery(j, m, final_only=True) for j, m in pairs]).result()
    return mailboxes


def expected(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Greedy tokens computed from nothing."""
    session, tokens = FakeSession(OPTIONS), list(prompt)
    for _ in range(count):
        tokens.append(int(session.reference(tokens).argmax()))
    return tuple(tokens[len(prompt) :])


def test_requests_are_served_and_the_end_is_clean() -> None:
    thread = start(FakeSession(OPTIONS))
    one, two = deliver(thread, job("a"), job("b", (4, 5), max_tokens=7))
    assert one.wait().outputs[0].token_ids == expected((1, 2, 3), 4)
    assert two.wait().outputs[0].token_ids == expected((4, 5), 7)
    assert thread.stats().result().running == 0
    thread.close()
    thread.close()
    assert not any(t.name == "trtllm-lite-engine" for t in threading.enumerate())


def test_all_of_a_submission_is_added_or_none() -> None:
    thread = start(FakeSession(OPTIONS))
    with pytest.raises(RequestError):
        deliver(thread, job("a"), job("b", ()), job("c"))
    stats = thread.stats().result()
    assert (stats.waiting, stats.running, stats.steps) == (0, 0, 0)
    (mailbox,) = deliver(thread, job("a"))
    assert mailbox.wait().finished
    thread.close()


def test_closing_ends_what_runs_and_what_waits_with_abort() -> None:
    session = GatedSession()
    thread = start(session)
    mailboxes = deliver(thread, *(job(name, max_tokens=50) for name in "abc"))
    session.entered.wait()
    closer = threading.Thread(target=thread.close)
    closer.start()
    session.gate.set()
    closer.join()
    results = [mailbox.wait() for mailbox in mailboxes]
    assert {r.outputs[0].finish_reason for r in results} == {"abort"}
    whole = expected((1, 2, 3), 50)
    assert all(whole[: len(r.outputs[0].token_ids)] == r.outputs[0].token_ids for r in results)


def test_after_the_end_every_call_is_told_so() -> None:
    thread = start(FakeSession(OPTIONS))
    thread.close()
    for call in (thread.stats, lambda: thread.abort(["a"]), lambda: deliver(thread, job("a"))):
        with pytest.raises(EngineDeadError, match="closed"):
            call()
    thread.abort_soon(["a"])


def test_commands_that_come_in_with_the_end_are_answered() -> None:
    """They lie in the queue behind the request to end: nobody may wait for ever."""
    session = GatedSession()
    thread = start(session)
    deliver(thread, job("a"))
    session.entered.wait()
    closer = threading.Thread(target=thread.close)
    closer.start()
    late: list[Pending[EngineStats]] = []
    while closer.is_alive():
        try:
            late.append(thread.stats())
        except EngineDeadError:
            break
        if len(late) == 100:
            session.gate.set()
    closer.join()
    for answer in late:
        with contextlib.suppress(EngineDeadError):
            assert answer.result().slots_total == CONFIG.max_num_seqs


def test_a_death_of_the_engine_reaches_every_reader_and_every_later_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread = start(DyingSession(OPTIONS))
    for mailbox in deliver(thread, job("a"), job("b")):
        with pytest.raises(EngineDeadError, match="SystemExit: out of order"):
            mailbox.wait()
    with pytest.raises(EngineDeadError, match="out of order"):
        thread.stats()
    thread.close()
    assert "the engine thread died" in caplog.text


def test_a_reader_that_is_gone_ends_only_its_own_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone(Mailbox):
        def put(self, output: RequestOutput) -> None:
            raise RuntimeError("the loop is closed")

    thread = start(FakeSession(OPTIONS))
    kept = WaitingMailbox()
    lost = Delivery(job("lost", max_tokens=50), Gone(lambda: None))
    thread.submit([lost, Delivery(job("kept"), kept, final_only=True)]).result()
    assert kept.wait().outputs[0].token_ids == expected((1, 2, 3), 4)
    stats = thread.stats().result()
    assert (stats.running, stats.finished["abort"]) == (0, 1)
    assert "lost its reader" in caplog.text
    assert thread._processor.unfinished == ()
    thread.close()


def test_the_thread_may_be_closed_from_itself(caplog: pytest.LogCaptureFixture) -> None:
    """As a finalizer that happens to run there does."""
    thread = start(FakeSession(OPTIONS))
    mailbox = Mailbox(thread.close)
    thread.submit([Delivery(job("a"), mailbox)]).result()
    thread._thread.join(timeout=10)
    assert not thread._thread.is_alive()
    assert caplog.text == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_process_is_told_that_the_thread_is_not_there() -> None:
    thread = start(FakeSession(OPTIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is the point
        child = os.fork()
    if child == 0:
        try:
            thread.stats()
        except EngineDeadError as error:
            os._exit(0 if "fork" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.close()
