"""The engine, `LLM` and `AsyncLLM` on a fake TensorRT: the tokens of the model, whatever is
batched, reused, preempted or guessed."""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.backends import tensorrt
from trtllm_lite.runtime.backends.trt_session import TrtSession
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.loading import LoadOptions, load
from trtllm_lite.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
FITS: dict[str, Any] = {"max_num_batched_tokens": 16}

Make = Callable[..., Any]


@pytest.fixture
def here(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A rig whose TensorRT is the one that is installed."""
    monkeypatch.setattr(tensorrt, "Machinery", lambda: rig.machinery)
    yield rig
    assert rig.device.addresses == ()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(28) for _ in range(rng.randint(1, 24))] for _ in range(count)]


def tokens_of(llm: LLM, asked: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompt_token_ids=asked, params=params)
    return [output.outputs[0].token_ids for output in outputs]


def session_of(llm: LLM) -> TrtSession:
    session = llm._parts.engine._session
    assert isinstance(session, TrtSession)
    return session


def test_greedy_tokens_of_many_requests_are_those_of_onnx_runtime_and_of_the_model(
    here: Any,
) -> None:
    asked = prompts(9)
    with LLM(here.bundle.folder, **FITS) as llm:
        assert (llm.config.max_num_seqs, llm.config.max_model_len) == (4, 40)
        assert llm.config.max_kv_tokens == 160
        assert llm.tuning is None
        made = tokens_of(llm, asked, GREEDY)
        counts = here.count(session_of(llm))
        assert min(counts) > 0
        assert session_of(llm).info.backend == "tensorrt"
    assert made == [here.model.greedy(prompt, 9) for prompt in asked]
    assert sum(x.launches for x in here.device.recorded) > 0.5 * counts[1]
    with LLM(here.bundle.folder, backend="onnxruntime", intra_op_num_threads=1, **FITS) as llm:
        assert tokens_of(llm, asked, GREEDY) == made


def test_prefixes_are_taken_from_the_store_and_put_back_on_the_device(here: Any) -> None:
    shared = prompts(1, seed=4)[0][:1] * 32
    asked = [[*shared, i] for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(here.bundle.folder, **FITS) as llm:
        made = [tokens_of(llm, [prompt], params)[0] for prompt in asked]
        assert llm.stats().prefix_hit_tokens >= 32
    assert made == [here.model.greedy(prompt, 4) for prompt in asked]


def test_preempted_requests_come_back_with_the_same_tokens(here: Any) -> None:
    asked = prompts(6, seed=2)
    with LLM(here.bundle.folder, max_kv_tokens=44, **FITS) as llm:
        made = tokens_of(llm, asked, GREEDY)
        assert llm.stats().preemptions > 0
    assert made == [here.model.greedy(prompt, 9) for prompt in asked]


def test_guessed_tokens_are_checked_by_the_extend_plan(here: Any) -> None:
    prompt = [3, 4, 5] * 4
    with LLM(here.bundle.folder, speculation="ngram", **FITS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        (made,) = tokens_of(llm, [prompt], params)
        assert llm.stats().draft_tokens > 0
        assert here.count(session_of(llm))[2] > 0
    assert made == here.model.greedy(prompt, 20)


def test_prompt_logprobs_come_in_as_many_runs_as_the_profile_asks_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(num_logits=(1, 4))
    monkeypatch.setattr(tensorrt, "Machinery", lambda: rig.machinery)
    prompt = prompts(1, seed=3)[0] + [1, 2, 3, 4, 5]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM(rig.bundle.folder, **FITS) as llm:
        (output,) = llm.generate(prompt_token_ids=[prompt], params=params)
    reference = rig.model.reference(prompt)
    assert output.prompt_logprobs is not None
    for place, found in enumerate(output.prompt_logprobs[1:]):
        assert found is not None
        likely = int(reference[place].argmax())
        assert found[likely].rank == 1


def test_async_requests_that_are_aborted_leave_the_others_alone(here: Any) -> None:
    async def serve() -> list[tuple[int, ...]]:
        async with AsyncLLM(here.bundle.folder, **FITS) as llm:
            tasks = [
                asyncio.create_task(llm.generate(prompt_token_ids=p, params=GREEDY))
                for p in prompts(5)
            ]
            await asyncio.sleep(0.02)
            tasks[1].cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
        return [x.outputs[0].token_ids for x in done if not isinstance(x, BaseException)]

    made = asyncio.run(serve())
    expected = [here.model.greedy(prompt, 9) for prompt in prompts(5)]
    assert set(made) <= set(expected)
    assert len(made) >= 4


def test_what_only_the_cpu_has_is_refused_and_nothing_stays_open(here: Any) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("intra_op_num_threads: got 2", {"intra_op_num_threads": 2}),
        ("kernels: got 'native'", {"kernels": "native"}),
        ("kv_dtype: got 'int8'", {"kv_dtype": "int8"}),
        ("max_num_batched_tokens: got 57", {"max_num_batched_tokens": 17}),
        ("takes 4 requests at once, 5 are asked for", {"max_num_seqs": 5, "backend": "tensorrt"}),
    ]
    for message, options in wrong:
        with pytest.raises(Exception, match=message):
            load(here.bundle.folder, LoadOptions(**{**FITS, **options}))
        assert here.device.addresses == ()


def test_a_failing_step_ends_its_requests_alone(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(here.bundle.folder, enable_prefix_caching=False, **FITS) as llm:
        context = here.context_of(session_of(llm), "prefill")
        monkeypatch.setattr(context, "execute_async_v3", lambda stream: False)
        (output,) = llm.generate(prompt_token_ids=[[1, 2, 3]], params=GREEDY)
        assert output.outputs[0].finish_reason == "error"
        monkeypatch.undo()
        assert tokens_of(llm, [[1, 2, 3]], GREEDY) == [here.model.greedy([1, 2, 3], 9)]
