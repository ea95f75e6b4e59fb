"""A request's prompts side by side: every result, signs of silence, and ends."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.errors import EngineDeadError
from trtllm_lite.runtime.request_maker import Source
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.server.convert import Ask
from trtllm_lite.runtime.server.runs import Run

NewLLM = Callable[[bool], tuple[AsyncLLM, Any]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


def asks(texts: Sequence[str]) -> list[Ask]:
    return [Ask(Source(prompt=text), PARAMS) for text in texts]


@pytest.mark.parametrize("final_only", [True, False])
def test_deltas_of_every_prompt_add_up(new_llm: NewLLM, final_only: bool) -> None:
    async def main() -> None:
        llm, _ = new_llm(True)
        texts = [f"prompt {number}" for number in "0123456"]
        whole = [await llm.generate(text, PARAMS) for text in texts]
        said = dict.fromkeys(range(len(texts)), "")
        finished = list[int]()
        async with Run(llm, asks(texts), final_only=final_only) as run:
            await run.start()
            async for item in run.results(60):
                assert item is not None
                index, output = item
                said[index] += output.outputs[0].delta
                finished += [index] * output.finished
        assert sorted(finished) == sorted(said)
        assert said == {i: result.outputs[0].text for i, result in enumerate(whole)}
        await llm.close()

    asyncio.run(main())


def test_silence_is_told_once_for_each_beat(new_llm: NewLLM) -> None:
    async def main() -> None:
        llm, session = new_llm(False)
        async with Run(llm, asks(["hello"]), final_only=False) as run:
            await run.start()
            results = run.results(0.01)
            assert [await anext(results) for _ in range(3)] == [None] * 3
            session.permits.release(1)
            item = await anext(results)
            while item is None:
                item = await anext(results)
            assert item[1].outputs[0].token_ids
            assert await anext(results) is None
            await results.aclose()
        session.permits.release(1000)
        while (await llm.stats()).slots_used:
            await asyncio.sleep(0.001)
        await llm.close()

    asyncio.run(main())


def test_a_slow_reader_misses_nothing(new_llm: NewLLM) -> None:
    async def main() -> None:
        llm, _ = new_llm(True)
        whole = await llm.generate("hello", PARAMS)
        async with Run(llm, asks(["hello"]), final_only=False) as run:
            await run.start()
            while (await llm.stats()).finished.get("length", 0) < 2:
                await asyncio.sleep(0.001)
            items = [item async for item in run.results(60)]
        assert len(items) == 1
        assert items[0] is not None
        assert items[0][1].outputs[0].delta == whole.outputs[0].text
        await llm.close()

    asyncio.run(main())


def test_an_engine_that_dies_ends_it(new_llm: NewLLM, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        llm, session = new_llm(False)
        async with Run(llm, asks(["hello"]), final_only=False) as run:
            await run.start()
            session.fatal = True
            session.permits.release(1000)
            with pytest.raises(EngineDeadError):
                async for _ in run.results(60):
                    pass
        await llm.close()

    asyncio.run(main())
    assert "the engine thread died" in caplog.text
