"""The measurement: rounds in which the contenders alternate, turn by turn."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_lite.tools.bandwidth import BUFFER_BYTES, PASSES, MemoryReader
from trtllm_lite.tools.compare_peers.adapters.base import Clock
from trtllm_lite.tools.compare_peers.contenders import Contender
from trtllm_lite.tools.compare_peers.gate import Noise, noise_between, read_cpu
from trtllm_lite.tools.compare_peers.prompts import Texts, speed_prompt
from trtllm_lite.tools.compare_peers.protocol import ProtocolError
from trtllm_lite.tools.compare_peers.turns import (
    MANY,
    ONE,
    Part,
    Sample,
    Turn,
    batch_values,
    rotated,
    stream_values,
)
from trtllm_lite.tools.compare_peers.worker_process import WorkerProcess, load_average

MACHINE = "this machine"  # in place of a contender, in samples
WARM_UP = 16
FAILURES = (RuntimeError, ProtocolError)

# Values by metric name, and what others did meanwhile.
Measured = tuple[dict[str, float], Noise]

# Measures once; its argument makes the text one that nobody had before.
Take = Callable[[tuple[int, ...]], Measured]


@dataclass(frozen=True)
class RunOptions:
    """threads: of each runtime; gate: share of the CPUs that others may use during a turn; retries:
    further tries of one that was not quiet. `reference` holds float32 logits of the texts' windows;
    without it no quality is measured. `buffer`: bytes of memory that are read to measure its rate.
    """

    threads: int
    gate: float
    retries: int
    logs: Path
    reference: Path | None = None
    parts: tuple[Part, ...] = (ONE, MANY)
    buffer: int = BUFFER_BYTES


@dataclass
class Findings:
    """All that was measured. An entry of `errors` is a contender's name and one line."""

    samples: list[Sample] = field(default_factory=list)
    quality: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    errors: list[tuple[str, str]] = field(default_factory=list)


class Runner:
    """Runs a comparison. A contender that fails is left out from then on, with its error."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        texts: Texts,
        options: RunOptions,
        tell: Callable[[str], None],
    ) -> None:
        self._contenders = {contender.name: contender for contender in contenders}
        self._texts = texts
        self._options = options
        self._tell = tell
        self.findings = Findings()

    def run(self) -> Findings:
        """Part by part, then quality; workers live for one part."""
        with MemoryReader(self._options.threads, self._options.buffer) as memory:
            for part in self._options.parts:
                self._part(part, memory)
        if self._options.reference is not None:
            for contender in list(self._contenders.values()):
                self._guarded(contender.name, partial(self._score, contender))
        return self.findings

    def _part(self, part: Part, memory: MemoryReader) -> None:
        with ExitStack() as stack:
            workers: dict[str, WorkerProcess] = {}
            for contender in list(self._contenders.values()):
                worker = stack.enter_context(self._worker(contender))
                if self._guarded(contender.name, partial(self._open, worker, part)):
                    workers[contender.name] = worker
                else:
                    worker.close()
            for number in range(part.rounds):
                for turn in part.turns:
                    self._tell(f"{part.name}: round {number + 1} of {part.rounds}, {turn.name}")
                    self._turn(workers, turn, number, memory)
            for key, worker in workers.items():
                self.findings.memory.setdefault(key, {})[part.name] = worker.memory()

    def _turn(
        self, workers: dict[str, WorkerProcess], turn: Turn, number: int, memory: MemoryReader
    ) -> None:
        """One turn of each contender, as often as it is repeated. Where one request decodes, the
        rate of memory has a turn too."""
        for repeat in range(turn.repeats):
            for name in rotated(list(workers), number + repeat):
                key = (number, repeat, turn.prompt, turn.requests)
                take = partial(self._take, workers[name], turn)
                if not self._guarded(name, partial(self._sample, name, turn, key, take)):
                    workers.pop(name).close()  # it may still be at work
            if turn.decodes:
                take = partial(self._read, memory)
                self._sample(MACHINE, turn, (number, repeat), take)

    def _sample(self, name: str, turn: Turn, key: tuple[int, ...], take: Take) -> None:
        """Measure until it was quiet, or the retries are used up; all tries are recorded."""
        for attempt in range(self._options.retries + 1):
            values, noise = take((*key, attempt))
            kept = noise.quiet(self._options.gate)
            figures = (noise.others, noise.steal, load_average())
            self.findings.samples.append(
                Sample(name, turn.name, key[0], attempt, values, *figures, kept)
            )
            if kept:
                return

    def _take(self, worker: WorkerProcess, turn: Turn, key: tuple[int, ...]) -> Measured:
        if turn.kind == "start":
            return self._start(worker.contender, key)
        return self._ask(worker, turn, key)

    def _read(self, memory: MemoryReader, _: tuple[int, ...]) -> Measured:
        """The rate of memory, while all contenders are paused."""
        before = read_cpu((os.getpid(),))
        values = {"memory_rate": memory.rate(PASSES)}
        return values, noise_between(before, read_cpu((os.getpid(),)))

    def _ask(self, worker: WorkerProcess, turn: Turn, key: tuple[int, ...]) -> Measured:
        """A short request wakes the worker's threads and caches; the next one is measured."""
        pids = (os.getpid(), worker.pid)
        worker.ask("stream", prompt=self._prompt((*key, 99), WARM_UP), new=2)
        prompts = [self._prompt((*key, i), turn.prompt) for i in range(turn.requests)]
        before = read_cpu(pids)
        if turn.kind in ("stream", "long"):
            reply = worker.ask("stream", prompt=prompts[0], new=turn.new)
            values = stream_values(turn, reply["times"])
        else:
            values = batch_values(turn, worker.ask("batch", prompts=prompts, new=turn.new))
        noise = noise_between(before, read_cpu(pids))
        worker.pause()
        return values, noise

    def _start(self, contender: Contender, key: tuple[int, ...]) -> Measured:
        """A process of its own, from nothing to the first token. Files are in the page cache."""
        before, clock = read_cpu((os.getpid(),)), Clock()
        with self._worker(contender) as worker:
            loaded = self._load(worker, contender.path, ONE)
            worker.ask("stream", prompt=self._prompt(key, 32), new=1)
            values = {"load": loaded["seconds"], "first_token": clock()}
            return values, noise_between(before, read_cpu((os.getpid(), worker.pid)))

    def _open(self, worker: WorkerProcess, part: Part) -> None:
        """Load, and one request of each sort, so that what is done once is done."""
        name = worker.contender.name
        self._load(worker, worker.contender.path, part)
        self.findings.versions[name] = worker.ask("about")["version"]
        worker.ask("stream", prompt=self._prompt((part.slots, 128), 128), new=4)
        if part.slots > 1:
            prompts = [self._prompt((part.slots, i), 128) for i in range(4)]
            worker.ask("batch", prompts=prompts, new=4)
        worker.pause()

    def _score(self, contender: Contender) -> None:
        """Quality on each of the paths that can differ, in a process of its own."""
        with self._worker(contender) as worker:
            self._load(worker, contender.scored or contender.path, ONE)
            found = self.findings.quality.setdefault(contender.name, {})
            windows = [list(window) for window in self._texts.windows]
            for path in worker.ask("about")["paths"]:
                self._tell(f"quality: {contender.name}, {path}")
                reference = str(self._options.reference)
                found[path] = worker.ask("score", windows=windows, reference=reference, path=path)

    def _load(self, worker: WorkerProcess, path: str, room: Part) -> Any:
        threads = self._options.threads
        return worker.ask(
            "load", path=path, threads=threads, slots=room.slots, max_len=room.max_len
        )

    def _worker(self, contender: Contender) -> WorkerProcess:
        log = self._options.logs / f"{contender.name.replace(' ', '-')}.txt"
        return WorkerProcess(contender, log)

    def _prompt(self, key: tuple[int, ...], length: int) -> list[int]:
        return speed_prompt(self._texts, key, length)

    def _guarded(self, name: str, work: Callable[[], None]) -> bool:
        """False when it failed; the contender is then out."""
        try:
            work()
        except FAILURES as error:
            self._tell(f"{name} is out: {error}")
            self.findings.errors.append((name, str(error)))
            self._contenders.pop(name, None)
            return False
        return True
