"""The thread that owns an engine: everything that touches the engine happens on it.

Callers hand it work and get a `Pending`; between two steps it takes what has come in. It sleeps in
the queue while there is nothing to do. Results go to the mailbox of their request.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from trtllm_lite.runtime.engine import Engine, EngineStats
from trtllm_lite.runtime.errors import EngineDeadError
from trtllm_lite.runtime.mailbox import Mailbox
from trtllm_lite.runtime.output_processor import OutputProcessor
from trtllm_lite.runtime.outputs import RequestOutput, TokenEvent
from trtllm_lite.runtime.pending import Pending
from trtllm_lite.runtime.request_maker import Job
from trtllm_lite.runtime.step_timer import StepTimer
from trtllm_lite.runtime.tokenizer import Tokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)
_CLOSED = "the engine is closed; open a new one"
_FORKED = "the engine's thread does not run in this process; open the bundle after the fork"


@dataclass(frozen=True)
class Delivery:
    """A job and where its results go; `final_only`: one result, when all of it is done."""

    job: Job
    mailbox: Mailbox
    final_only: bool = False


@dataclass(frozen=True)
class _Command(Generic[T]):
    work: Callable[[], T]
    answer: Pending[T]

    def run(self) -> None:
        try:
            value = self.work()
        except Exception as error:
            self.answer.fail(error)
        else:
            self.answer.set(value)


class EngineThread:
    """Owns the engine and closes it. All methods may be called from any thread, finalizers
    included: nothing here waits for a lock that the caller could hold."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._processor = OutputProcessor(tokenizer)
        self._mailboxes: dict[str, Mailbox] = {}
        # None asks the thread to end. SimpleQueue.put may be called from a finalizer.
        self._commands: SimpleQueue[_Command[Any] | None] = SimpleQueue()
        self._dead: str | None = None
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="trtllm-lite-engine", daemon=True)
        self._thread.start()

    def submit(self, deliveries: Sequence[Delivery]) -> Pending[None]:
        """Add all requests before the next step, or none: the answer is then the RequestError.
        Raises EngineDeadError when there is no engine any more."""
        return self._call(lambda: self._add_all(deliveries))

    def abort(self, request_ids: Iterable[str]) -> Pending[None]:
        """End requests before the next step; each delivers its last result. Requests that are not
        there, or not any more, are no error. Raises EngineDeadError."""
        ids = tuple(request_ids)
        self._engine.unwanted.add(ids)
        answer = self._call(lambda: self._abort_unwanted(ids))
        self._engine.unwanted.give_up()
        return answer

    def abort_soon(self, request_ids: Iterable[str]) -> None:
        """The same without waiting and without errors: nobody is left to read the results."""
        if self._dead is None and self._thread.is_alive():
            self.abort(request_ids)

    def stats(self) -> Pending[EngineStats]:
        """The engine's numbers, read between two steps. Raises EngineDeadError."""
        return self._call(self._engine.stats)

    def last_stats(self) -> EngineStats:
        """The engine's numbers as its last step or command left them: waits for nothing, and does
        not take the engine's time."""
        return self._stats

    def time_steps(self, timer: StepTimer) -> Pending[None]:
        """Report every step from the next one on to `timer`. Raises EngineDeadError."""
        return self._call(lambda: self._set_timer(timer))

    def close(self) -> None:
        """End every request with "abort", close the engine, and wait for it. Idempotent."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, work: Callable[[], T]) -> Pending[T]:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if not self._thread.is_alive():
            raise EngineDeadError(_FORKED)
        answer: Pending[T] = Pending()
        self._commands.put(_Command(work, answer))
        if self._dead is not None:
            # The thread may have ended before it could see this command.
            self._reject_commands()
        return answer

    # Everything below runs on the engine thread, except the rejection of late commands.

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._deliver(self._engine.step())
                self._engine.timer.end()
            self._abort(self._processor.unfinished)
            reason = _CLOSED
        except BaseException as error:
            _log.exception("the engine thread died")
            reason = f"the engine died: {type(error).__name__}: {' '.join(str(error).split())}"
        self._end(reason)

    def _take_commands(self) -> bool:
        """Do what has come in, waiting while the engine has nothing to do. False at the end."""
        while True:
            # Only this thread takes commands, so what is there stays there.
            if self._engine.has_unfinished and self._commands.empty():
                return True
            command = self._commands.get()
            if command is None:
                return False
            command.run()

    def _set_timer(self, timer: StepTimer) -> None:
        self._engine.timer = timer

    def _add_all(self, deliveries: Sequence[Delivery]) -> None:
        added: list[str] = []
        try:
            for delivery in deliveries:
                self._engine.add(delivery.job.request)
                added.append(delivery.job.request.id)
        except BaseException:
            for request_id in added:
                self._engine.abort(request_id)
            raise
        for delivery in deliveries:
            request = delivery.job.request
            self._mailboxes[request.id] = delivery.mailbox
            self._processor.add(request, delivery.job.prompt, final_only=delivery.final_only)
        self._stats = self._engine.stats()

    def _abort_unwanted(self, request_ids: Sequence[str]) -> None:
        self._abort(request_ids)
        self._engine.unwanted.remove(request_ids)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._deliver(self._engine.abort(request_id))

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        processed = self._processor.process(events)
        for stop in processed.stops:
            self._engine.stop(stop.request_id, stop.index, stop.stop_reason)
        # Before the results: who has one finds it in the numbers.
        self._stats = self._engine.stats()
        for output in processed.outputs:
            self._hand_over(output)

    def _hand_over(self, output: RequestOutput) -> None:
        mailbox = self._mailboxes[output.request_id]
        if output.finished:
            del self._mailboxes[output.request_id]
        try:
            mailbox.put(output)
        except Exception:
            _log.warning("request %s has lost its reader", output.request_id, exc_info=True)
            self._processor.forget(output.request_id)
            self._mailboxes.pop(output.request_id, None)
            self._engine.abort(output.request_id)
            self._stats = self._engine.stats()

    def _end(self, reason: str) -> None:
        """From here on every caller is told `reason`."""
        self._dead = reason
        for mailbox in self._mailboxes.values():
            try:
                mailbox.fail(reason)
            except Exception:
                _log.warning("a request has lost its reader", exc_info=True)
        self._mailboxes.clear()
        try:
            self._engine.close()
        except Exception:
            _log.exception("the engine could not be closed")
        self._reject_commands()

    def _reject_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            if command is not None:
                command.answer.fail(EngineDeadError(self._dead or _CLOSED))
