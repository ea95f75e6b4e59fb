"""Runs jobs in processes of their own, each step within its time, all within the time of all.

A step that takes too long, or whose process ends, has failed; a new process goes on with the next
one. So nothing that a driver or a library does can keep the results of the others back. What there
is no time for is left out: jobs and their steps come in the order of their importance. So is the
rest of a job that loses one process after the other.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trtllm_lite.tools.doctor_checks.jobs import Job, write_job
from trtllm_lite.tools.doctor_checks.result import CheckResult, from_json
from trtllm_lite.tools.doctor_checks.steps import Step, steps_of, time_to_begin

WORKER = (sys.executable, "-m", "trtllm_lite.tools.doctor_checks.worker")
START_S = 60.0
"""For a process to import what it needs."""

EXIT_S = 10.0
"""For a process that has closed its output to end."""

MOST_LOST = 3
"""Processes in a row that are lost over their first step: what is left of a job is then left out,
because a library that always crashes or hangs would take the time of the other jobs."""

OTHER = "its process said something else than a result"
KEPT_STDERR = 4000
Clock = Callable[[], float]
Told = Callable[[CheckResult], None]


class Runner:
    """`limit_s`: for all jobs together. `folder`: for the files that pass jobs on, and stderr.
    `command`: that of a worker, without the job's file."""

    def __init__(
        self,
        folder: Path,
        limit_s: float,
        command: Sequence[str] = WORKER,
        clock: Clock = time.monotonic,
    ) -> None:
        self._folder = folder
        self._command = tuple(command)
        self._clock = clock
        self._limit = limit_s
        self._end = clock() + limit_s

    def run(self, job: Job, told: Told) -> list[CheckResult]:
        """All steps of a job; `told` hears of each result when it comes."""
        results: list[CheckResult] = []

        def take(result: CheckResult) -> None:
            results.append(result)
            told(result)

        steps, lost = steps_of(job), 0
        while len(results) < len(steps):
            done = len(results)
            left = steps[done:]
            if not self._has_time(left):
                self._leave_out(job, left, self._no_time(left), take)
            elif lost == MOST_LOST:
                self._leave_out(job, left, f"{lost} processes in a row were lost", take)
            elif self._run_process(job, left, take):
                lost = lost + 1 if len(results) == done + 1 else 1
            else:
                lost = 0
        return results

    def _left(self) -> float:
        return max(self._end - self._clock(), 0.0)

    def _has_time(self, steps: Sequence[Step]) -> bool:
        return self._left() >= time_to_begin(steps)

    def _no_time(self, steps: Sequence[Step]) -> str:
        left, needed = self._left(), time_to_begin(steps)
        return (
            f"{left:.0f} s of {self._limit:.0f} are left, and what comes next takes about "
            f"{needed:.0f}"
        )

    def _leave_out(self, job: Job, steps: Sequence[Step], why: str, take: Told) -> None:
        for step in steps:
            take(CheckResult(step.name, job.lane, "skipped", f"left out: {why}"))

    def _run_process(self, job: Job, steps: Sequence[Step], take: Told) -> bool:
        """One process, until it ends, has to be ended, or there is no time for the next step: at
        least one result. Whether it was lost before it came to that."""
        path = self._folder / "job.json"
        write_job(job, path)
        with (self._folder / "stderr.txt").open("w+b") as errors:
            worker = _Worker([*self._command, str(path)], errors)
            try:
                started = self._expect(worker, job, steps[0], START_S, "ready", take)
                return started is None or self._ask(worker, job, steps, take)
            finally:
                worker.end()

    def _ask(self, worker: "_Worker", job: Job, steps: Sequence[Step], take: Told) -> bool:
        """Whether the process was lost."""
        for i, step in enumerate(steps):
            if i and not self._has_time(steps[i:]):
                return False
            worker.ask(step.name)
            line = self._expect(worker, job, step, step.times.most, "result", take)
            if line is None:
                return True
            take(from_json(line))
        return False

    def _expect(
        self, worker: "_Worker", job: Job, step: Step, most: float, key: str, take: Told
    ) -> Any:
        """The value of the next line's `key`; None, and a result that says why, where none
        comes."""
        start, seconds = self._clock(), min(most, self._left())
        line = worker.line(seconds)
        if line is not None and key in line:
            return line[key]
        spent, ended = self._clock() - start, worker.ending()
        if line is not None:
            ended = OTHER
        if not ended and seconds < most:
            reason = f"not finished: the time of all checks was over after {spent:.0f} s of it"
            take(CheckResult(step.name, job.lane, "skipped", reason, seconds=spent))
        else:
            reason = ended or f"took longer than {seconds:.3g} s"
            take(CheckResult(step.name, job.lane, "failed", reason, seconds=spent))
        return None


class _Worker:
    """A worker process, what it is asked, and the lines that it writes."""

    def __init__(self, command: Sequence[str], errors: Any) -> None:
        self._errors = errors
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        self._silent = False
        """Whether it can write nothing more."""
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        stream = self._process.stdout
        if stream is not None:
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def ask(self, name: str) -> None:
        """Have a step run. A process that has ended does not hear it."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(f"{name}\n".encode())
                self._process.stdin.flush()

    def line(self, seconds: float) -> dict[str, Any] | None:
        """The next line, empty when it is no object; None when none comes in time, or none will."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        if line is None:
            self._silent = True
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_S)
            return None
        try:
            value = json.loads(line)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def ending(self) -> str:
        """How the process ended, with the last line of its stderr; empty while it works."""
        code = self._process.poll()
        if code is None:
            return "its process hangs at its end" if self._silent else ""
        how = f"code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        last = self._last_words()
        return f"its process ended with {how}{f': {last}' if last else ''}"

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - KEPT_STDERR))
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]

    def end(self) -> None:
        """End the process and all that it started."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
