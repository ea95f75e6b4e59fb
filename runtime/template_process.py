"""One worker of `template_worker` and the pipe to it, with a deadline on every exchange."""

import json
import os
import select
import subprocess
import sys
import time

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.template_worker import Answer, Question, Setup, line_of

MAX_ANSWER = 64 * 2**20
"""Bytes of one answer: the longest prompt, with every character escaped, is less than half."""
_PIECE = 2**18
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")


class ProcessLostError(Exception):
    """The process has ended, or has to be ended. The message completes "the chat template ..."."""


class TemplateProcess:
    """A process that has compiled one template. For one thread at a time; `close` it, also after
    a ProcessLostError."""

    def __init__(self, setup: Setup, seconds: float) -> None:
        """Start it, within so many seconds. Raises BundleError for a template that cannot be
        used, ProcessLostError, OSError where the system has no process to give."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trtllm_lite.runtime.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            bufsize=0,
            # Ctrl-C is for the parent, which may still have conversations to render.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._back = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        os.set_blocking(self._back.fileno(), False)
        try:
            answer = self._exchange(setup, seconds)
        except BaseException:
            self.close()
            raise
        if answer.text is None:
            self.close()
            raise BundleError(answer.param, answer.message)
        self.variables = frozenset(answer.text.split())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Question, seconds: float) -> Answer:
        """Render a conversation, within so many seconds. Raises ProcessLostError; ValueError for
        an integer of thousands of digits, which leaves the process as it was."""
        return self._exchange(question, seconds)

    def close(self) -> None:
        """End the process, whatever it is doing, and wait for its end. Idempotent."""
        self._process.kill()
        self._to.close()
        self._back.close()
        self._process.wait()

    def _exchange(self, value: Setup | Question, seconds: float) -> Answer:
        line, deadline = line_of(value), _Deadline(seconds)
        try:
            self._write(line, deadline)
            return _answer(self._read(deadline))
        except (OSError, ValueError, TypeError) as error:
            raise ProcessLostError("broke the process that renders it") from error

    def _write(self, line: bytes, deadline: "_Deadline") -> None:
        left = memoryview(line)
        while left:
            deadline.wait(self._to.fileno(), select.POLLOUT)
            left = left[os.write(self._to.fileno(), left[:_PIECE]) :]

    def _read(self, deadline: "_Deadline") -> bytes:
        """One line, and nothing after it."""
        answer = bytearray()
        while not answer.endswith(b"\n"):
            deadline.wait(self._back.fileno(), select.POLLIN)
            piece = os.read(self._back.fileno(), _PIECE)
            answer += piece
            if not piece or len(answer) > MAX_ANSWER:
                raise ProcessLostError("broke the process that renders it")
        return bytes(answer)


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def wait(self, descriptor: int, event: int) -> None:
        """Until the pipe is ready for `event`, or broken."""
        poll = select.poll()
        poll.register(descriptor, event)
        left = self._end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise ProcessLostError(f"took over {self._seconds:g} seconds")


def _environment() -> dict[str, str]:
    """What the worker needs to import what we import; none of our secrets."""
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def _answer(line: bytes) -> Answer:
    """Raises ValueError or TypeError for what a worker does not write."""
    answer = Answer(**json.loads(line))
    texts = (answer.text or "", answer.param, answer.message)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("an answer holds text")
    return answer
