"""Runs jobs in processes of their own, each step within its time, all within the time of all.

A step that takes too long, or whose process ends, has failed; a new process goes on with the next
one. So nothing that a driver or a library does can keep the results of the others back.
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
from trtllm_lite.tools.doctor_checks.worker import Step, steps_of

WORKER = (sys.executable, "-m", "trtllm_lite.tools.doctor_checks.worker")
START_S = 60.0
"""For a process to import what it needs."""

EXIT_S = 10.0
"""For a process that has closed its output to end."""

OTHER = "its process said something else than a result"
KEPT_STDERR = 4000
Clock = Callable[[], float]
Told = Callable[[CheckResult], None]


class Runner:
    """`limit_s`: for all jobs together. `folder`: for the files that pass jobs on, and stderr."""

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
        self._end = clock() + limit_s

    def run(self, job: Job, told: Told) -> list[CheckResult]:
        """All steps of a job; `told` hears of each result when it comes."""
        results: list[CheckResult] = []

        def take(result: CheckResult) -> None:
            results.append(result)
            told(result)

        steps = list(steps_of(job))
        while len(results) < len(steps):
            left = steps[len(results) :]
            if self._left() <= 0:
                for step in left:
                    take(CheckResult(step.name, job.lane, "skipped", "no time was left for it"))
                break
            self._run_process(job, left, take)
        return results

    def _left(self) -> float:
        return self._end - self._clock()

    def _run_process(self, job: Job, steps: Sequence[Step], take: Told) -> None:
        """One process, until it ends or has to be ended: at least one result."""
        path = self._folder / "job.json"
        write_job(job, path)
        with (self._folder / "stderr.txt").open("w+b") as errors:
            names = [step.name for step in steps]
            worker = _Worker([*self._command, str(path), *names], errors)
            try:
                self._listen(worker, job, steps, take)
            finally:
                worker.end()

    def _listen(self, worker: "_Worker", job: Job, steps: Sequence[Step], take: Told) -> None:
        for step in steps:
            if self._expect(worker, job, step, START_S, "begin", take) is None:
                return
            line = self._expect(worker, job, step, step.budget_s, "result", take)
            if line is None:
                return
            take(from_json(line))

    def _expect(
        self, worker: "_Worker", job: Job, step: Step, budget: float, key: str, take: Told
    ) -> Any:
        """The value of the next line's `key`; None, and a failed result, where none comes."""
        start = self._clock()
        seconds = min(budget, max(self._left(), 0.0))
        line = worker.line(seconds)
        if line is not None and key in line:
            return line[key]
        spent = self._clock() - start
        reason = worker.ending() or f"took longer than {seconds:.3g} s"
        if line is not None:
            reason = OTHER
        take(CheckResult(step.name, job.lane, "failed", reason, seconds=spent))
        return None


class _Worker:
    """A worker process and the lines that it writes."""

    def __init__(self, command: Sequence[str], errors: Any) -> None:
        self._errors = errors
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
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
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
