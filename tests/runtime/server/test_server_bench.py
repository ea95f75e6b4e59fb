"""bench --server end to end, over the fake model: a server, a client process, and both sides."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import EngineDeadError, StepError
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.tools.bench_server import compare
from trtllm_lite.tools.bench_server_run import SIDES, ServerBenchOptions

VOCAB = 84
OPTIONS = ServerBenchOptions(6, 5, rounds=2, warmup=1, seed=7, idle_streams=0)

NewLLM = Callable[[bool], tuple[AsyncLLM, Any]]


def test_both_sides_run_the_same_requests(new_llm: NewLLM, card: ModelCard) -> None:
    async def main() -> None:
        llm, _ = new_llm(True)
        rounds = await compare(llm, card, VOCAB, OPTIONS, NoProgress())
        assert len(rounds) == 2
        for each in rounds:
            for runs, count in ((each.alone, 1), (each.together, 3)):
                assert set(runs) == set(SIDES)
                for run in runs.values():
                    assert [t.tokens for t in run.timings] == [5] * count
                    assert all(t.start < t.first <= t.last for t in run.timings)
                    assert run.throughput > 0
            assert each.alone["http"].client_cpu > 0
            assert each.alone["in_process"].client_cpu == 0
        with pytest.raises(EngineDeadError):
            await llm.stats()

    asyncio.run(main())


def test_a_request_that_fails_ends_it(new_llm: NewLLM, card: ModelCard) -> None:
    async def main() -> None:
        llm, session = new_llm(True)
        session.fail_next(1)
        with pytest.raises(StepError, match="ended with error"):
            await compare(llm, card, VOCAB, OPTIONS, NoProgress())

    asyncio.run(main())
