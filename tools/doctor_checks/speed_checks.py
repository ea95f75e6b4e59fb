"""How fast it is: time per token of one request against the limit of the memory's rate, and the
throughput of a whole engine."""

import statistics
import time
from collections.abc import Callable

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.tools.doctor_checks import drive
from trtllm_lite.tools.doctor_checks.bench import Bench
from trtllm_lite.tools.doctor_checks.result import CheckFailedError, CheckSkippedError, Numbers

CONTEXT = 128
WARM_UP, TIMED = 8, 64
IMPOSSIBLE = 1.5
"""A step that reads its bytes so much faster than the memory gives them was not waited for, or did
not read them. A part of the weights may come from the second-level cache, which holds up to a third
of the model that is timed."""

CONCURRENCY = (1, 8, 32, 128)
PROMPT, ANSWER = 64, 64
BUDGET = 256
"""Tokens of a step: decoding rows and, beside them, pieces of prompts."""

Clock = Callable[[], float]


class TimePerToken:
    """The median decode step of one row at a context of about 128 tokens."""

    name = "time per token of one request"
    expected_s, budget_s = 5.0, 45.0

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock

    def run(self, bench: Bench) -> Numbers:
        facts = bench.facts
        length = min(CONTEXT, facts.capacity - WARM_UP - TIMED)
        if length < 1:
            raise CheckSkippedError(f"a slot holds {facts.capacity} tokens: too few to time steps")
        row = drive.random_row(80, length + WARM_UP + TIMED, facts.vocab_size)
        median = self._median(bench, row, length, slot=0)
        numbers = {"tpot_ms": 1e3 * median, "tokens_per_s": 1 / median}
        if facts.num_slots > 1:
            # Only runs from slot 0 on become CUDA graphs.
            numbers["tpot_without_graphs_ms"] = 1e3 * self._median(bench, row, length, slot=1)
        context = length + WARM_UP + TIMED / 2
        return self._against_limit(bench, median, context, numbers)

    def _median(self, bench: Bench, row: list[int], length: int, *, slot: int) -> float:
        """Seconds of a decode step in that slot."""
        drive.prompt(bench.subject, [row[:length]], first_slot=slot)
        seconds = []
        for n in range(length, len(row)):
            start = self._clock()
            drive.decode(bench.subject, [row[n]], [n], first_slot=slot)
            seconds.append(self._clock() - start)
        return statistics.median(seconds[WARM_UP:])

    def _against_limit(
        self, bench: Bench, median: float, context: float, numbers: Numbers
    ) -> Numbers:
        facts = bench.facts
        read = facts.weight_bytes + facts.kv_bytes * context
        numbers["bytes_per_step"] = read
        if facts.bandwidth is None:
            return numbers
        numbers["limit_ms"] = 1e3 * read / facts.bandwidth
        numbers["fraction_of_bandwidth"] = read / facts.bandwidth / median
        if numbers["fraction_of_bandwidth"] > IMPOSSIBLE:
            raise CheckFailedError(
                "steps take less time than memory needs for their bytes", numbers
            )
        return numbers


class Throughput:
    """A whole engine with so many requests of 64 tokens at once that answer with 64."""

    expected_s, budget_s = 4.0, 60.0

    def __init__(self, count: int, clock: Clock = time.perf_counter) -> None:
        self.name = f"throughput at {count}"
        self._count = count
        self._clock = clock

    def run(self, bench: Bench) -> Numbers:
        facts, needed = bench.facts, PROMPT + ANSWER + BUDGET
        if facts.capacity < needed:
            raise CheckSkippedError(f"a slot holds {facts.capacity} tokens of {needed}")
        if facts.num_slots < self._count:
            raise CheckSkippedError(f"the session has {facts.num_slots} slots")
        # Kernels may be compiled, and graphs recorded, the first time that a number of rows comes.
        self._measure(bench, self._count)
        return {"tokens_per_s": self._measure(bench, self._count)}

    def _measure(self, bench: Bench, count: int) -> float:
        """Generated tokens a second of all requests together."""
        engine = _engine(bench, count)
        for i in range(count):
            prompt = tuple(drive.random_row(90 + i, PROMPT, bench.facts.vocab_size))
            params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
            engine.add(Request(f"r{i}", prompt, params))
        tokens, start = 0, self._clock()
        while engine.has_unfinished:
            for event in engine.step():
                if event.error:
                    raise CheckFailedError(f"a step failed with {count} requests: {event.error}")
                tokens += 1
        seconds = self._clock() - start
        if tokens != count * ANSWER:
            raise CheckFailedError(f"{tokens} tokens came of {count} requests of {ANSWER}")
        return tokens / seconds


def _engine(bench: Bench, count: int) -> Engine:
    """An engine on the subject's session, which it is not given to close."""
    config = EngineConfig(
        max_num_seqs=count,
        max_model_len=PROMPT + ANSWER,
        max_num_batched_tokens=BUDGET,
        max_kv_tokens=count * (PROMPT + ANSWER),
        enable_prefix_caching=False,
    )
    return Engine(bench.subject, config, vocab_size=bench.facts.vocab_size, eos_token_ids=())
