"""The measuring part of `bench`: which runs, in which order, and what each gave."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trtllm_lite.runtime.errors import StepError, UsageError
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.step_timer import NullTimer, StepRecorder, StepTimer, StepTimes
from trtllm_lite.tools.metrics import new_tokens, span

if TYPE_CHECKING:
    from trtllm_lite.runtime.outputs import RequestOutput

WARM_UP = -1


@dataclass(frozen=True)
class BenchOptions:
    """The grid, how often each point of it runs, and whether steps are taken apart."""

    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    concurrencies: tuple[int, ...]
    repeats: int = 3
    warmup: int = 1
    seed: int = 0
    breakdown: bool = False

    def check(self, max_model_len: int) -> None:
        """Raises UsageError when the longest request does not fit."""
        longest = max(self.input_lens) + max(self.output_lens)
        if longest > max_model_len:
            got = f"{max(self.input_lens)} + {max(self.output_lens)} = {longest} tokens"
            raise UsageError(f"--input-len + --output-len: got {got}; allowed: {max_model_len}")


@dataclass(frozen=True)
class Point:
    """One point of the grid: `concurrency` requests that arrive together."""

    input_len: int
    output_len: int
    concurrency: int


@dataclass(frozen=True)
class Sample:
    """One run of one point, in seconds: ttft and tpot per request, the whole, and the parts of
    each step where they were asked for. Of the tokens that speculation guessed, those that were
    right are `accepted_tokens`."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    seconds: float
    output_tokens: int
    steps: tuple[StepTimes, ...] = ()
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def throughput(self) -> float:
        """Output tokens per second over all requests."""
        return self.output_tokens / self.seconds


class Generator(Protocol):
    """The part of `LLM` that is measured."""

    def generate(
        self,
        prompts: None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: list[list[int]],
    ) -> list["RequestOutput"]: ...

    def time_steps(self, timer: StepTimer) -> None: ...


def grid(options: BenchOptions) -> list[Point]:
    """Every point once, in the order given."""
    axes = product(options.input_lens, options.output_lens, options.concurrencies)
    return list(dict.fromkeys(Point(*values) for values in axes))


def schedule(options: BenchOptions) -> Iterator[tuple[int, Point]]:
    """(round, point) for every run: warm-ups first, then the rounds of repeats, each over the
    whole grid, so that a slow minute of the machine falls on all points alike."""
    for _ in range(options.warmup):
        yield from ((WARM_UP, point) for point in grid(options))
    for repeat in range(options.repeats):
        yield from ((repeat, point) for point in grid(options))


def run_bench(
    llm: Generator, vocab_size: int, options: BenchOptions, progress: Progress
) -> dict[Point, list[Sample]]:
    """Run the grid; warm-ups are not in the result. Raises StepError when a request fails."""
    samples: dict[Point, list[Sample]] = {point: [] for point in grid(options)}
    runs = list(schedule(options))
    step = ""
    for done, (repeat, point) in enumerate(runs):
        name = "warm-up" if repeat == WARM_UP else f"round {repeat + 1} of {options.repeats}"
        if name != step:
            progress.step(name)
            step = name
        progress.advance(done, len(runs), "runs")
        token_ids = prompts(point, vocab_size, (options.seed, done))
        sample = _run(llm, point, token_ids, breakdown=options.breakdown)
        if repeat != WARM_UP:
            samples[point].append(sample)
    return samples


def prompts(point: Point, vocab_size: int, seed: Sequence[int]) -> list[list[int]]:
    """Random token ids, the same for the same seed."""
    size = (point.concurrency, point.input_len)
    made: list[list[int]] = np.random.default_rng(seed).integers(0, vocab_size, size).tolist()
    return made


def _run(llm: Generator, point: Point, token_ids: list[list[int]], *, breakdown: bool) -> Sample:
    params = SamplingParams(temperature=0.0, max_tokens=point.output_len, ignore_eos=True)
    recorder = StepRecorder()
    if breakdown:
        llm.time_steps(recorder)
    results = llm.generate(params=params, prompt_token_ids=token_ids)
    if breakdown:
        # The last result comes before its step is over; this returns after it.
        llm.time_steps(NullTimer())
    for result in results:
        if result.outputs[0].error:
            raise StepError(f"a measured request failed: {result.outputs[0].error}")
    metrics = [result.metrics for result in results]
    return Sample(
        ttft=tuple(m.ttft for m in metrics if m.ttft is not None),
        tpot=tuple(m.tpot for m in metrics if m.tpot is not None),
        seconds=span(results),
        output_tokens=sum(map(new_tokens, results)),
        draft_tokens=sum(m.num_draft_tokens for m in metrics),
        accepted_tokens=sum(m.num_accepted_tokens for m in metrics),
        steps=tuple(recorder.steps),
    )
