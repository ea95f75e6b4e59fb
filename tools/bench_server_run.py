"""The measuring part of `bench --server`: the same requests with and without HTTP, in turns.

One engine serves both sides. In process, tasks of its event loop read `AsyncLLM`; over HTTP, a
client in another process reads the server that runs on the same loop. What differs is the server
and the client, whose CPU time is told too.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import StepError, UsageError
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.tools.bench_client import Timing, cpu_seconds
from trtllm_lite.tools.bench_run import Point, prompts

PATH = "/v1/completions"
SideName = Literal["in_process", "http"]
SIDES: tuple[SideName, SideName] = ("in_process", "http")
TOGETHER = 16
"""Requests at once, where the bundle has so many slots."""


@dataclass(frozen=True)
class ServerBenchOptions:
    """Lengths in tokens; `rounds` of each side, after `warmup` that do not count; `idle_streams`
    that wait at once; `starts` of the program."""

    input_len: int
    output_len: int
    rounds: int
    warmup: int
    seed: int
    idle_streams: int
    starts: int = 3

    def check(self, max_model_len: int) -> None:
        """Raises UsageError when a request does not fit, or is too short to have a pace."""
        length = self.input_len + self.output_len
        if length > max_model_len:
            got = f"{self.input_len} + {self.output_len} = {length} tokens"
            raise UsageError(f"--input-len + --output-len: got {got}; allowed: {max_model_len}")
        if self.output_len < 2:
            raise UsageError(f"--output-len: got {self.output_len}; allowed with --server: from 2")


@dataclass(frozen=True)
class Run:
    """Requests that ran together on one side. CPU seconds: of the process with the engine, and of
    the client, which is 0 in process."""

    timings: tuple[Timing, ...]
    engine_cpu: float
    client_cpu: float = 0.0

    @property
    def ttft(self) -> float:
        """Seconds; for a lone request."""
        return self.timings[0].first - self.timings[0].start

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; for a lone request."""
        only = self.timings[0]
        return (only.last - only.first) / (only.tokens - 1)

    @property
    def throughput(self) -> float:
        """Tokens per second over all requests."""
        span = max(t.last for t in self.timings) - min(t.start for t in self.timings)
        return sum(t.tokens for t in self.timings) / span


@dataclass(frozen=True)
class Round:
    """One round: both sides alone and together, each pair with the same prompts."""

    alone: Mapping[SideName, Run]
    together: Mapping[SideName, Run]


class LoadProcess:
    """The client in its process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "trtllm_lite.tools.bench_client"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the result of a command. Raises StepError when it failed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # both were asked for
        assert stdout is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        result: dict[str, Any] = json.loads(stdout.readline() or '{"error": "the client died"}')
        if "error" in result:
            raise StepError(f"the load failed: {result['error']}")
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class SideBench:
    """Runs requests on either side of one engine; `address`: where the server listens."""

    def __init__(
        self,
        llm: AsyncLLM,
        vocab_size: int,
        client: LoadProcess,
        address: tuple[str, int],
        options: ServerBenchOptions,
    ) -> None:
        self._llm = llm
        self._vocab_size = vocab_size
        self._client = client
        self._address = address
        self._options = options
        self._params = replace(
            llm.default_params(),
            temperature=0.0,
            max_tokens=options.output_len,
            ignore_eos=True,
        )

    async def rounds(self, progress: Progress) -> list[Round]:
        """All rounds but the warm-ups. Raises StepError when a request fails."""
        total = self._options.warmup + self._options.rounds
        made = []
        for number in range(total):
            progress.advance(number, total, "rounds")
            made.append(await self._round(number))
        return made[self._options.warmup :]

    async def _round(self, number: int) -> Round:
        """The sides change places from round to round: neither is always the one that comes
        after the other."""
        order = SIDES if number % 2 == 0 else SIDES[::-1]
        together = min(TOGETHER, self._llm.config.max_num_seqs)
        alone = {side: await self._run(side, 1, number) for side in order}
        return Round(alone, {side: await self._run(side, together, number) for side in order})

    async def _run(self, side: SideName, count: int, number: int) -> Run:
        point = Point(self._options.input_len, self._options.output_len, count)
        ids = prompts(point, self._vocab_size, (self._options.seed, number, count))
        before = cpu_seconds()
        if side == "in_process":
            timings = await asyncio.gather(*map(self._in_process, ids))
            return Run(tuple(timings), cpu_seconds() - before)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(None, self._client.ask, self._load(ids))
        found = tuple(Timing(**each) for each in result["timings"])
        return Run(found, cpu_seconds() - before, result["cpu_seconds"])

    async def _in_process(self, token_ids: list[int]) -> Timing:
        start, first = time.perf_counter(), 0.0
        async with await self._llm.submit(
            params=self._params, prompt_token_ids=token_ids
        ) as stream:
            async for output in stream:
                (choice,) = output.outputs
                if not first and choice.delta:
                    first = time.perf_counter()
        if choice.finish_reason != "length":
            raise StepError(f"a measured request ended with {choice.finish_reason}")
        last = time.perf_counter()
        return Timing(start, first or last, last, len(choice.token_ids))

    def _load(self, ids: Sequence[list[int]]) -> dict[str, Any]:
        host, port = self._address
        bodies = [body(each, self._options.output_len) for each in ids]
        return {"do": "load", "host": host, "port": port, "path": PATH, "bodies": bodies}


def body(prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
    """A streamed request that runs to its last token."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
