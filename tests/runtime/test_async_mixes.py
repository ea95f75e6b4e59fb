"""Batched equals alone: random mixes of requests, arrivals and departures through `AsyncLLM`."""

import asyncio
import random
import string
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import tokenizers
from tokenizers import decoders, models

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.loading import Parts
from trtllm_lite.runtime.outputs import CompletionOutput, RequestOutput
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.tokenizer import Tokenizer

LETTERS = string.ascii_lowercase + string.digits
VOCAB = len(LETTERS) + 1
CONFIG = EngineConfig(
    max_num_seqs=3,
    max_model_len=64,
    max_num_batched_tokens=16,
    max_kv_tokens=66,
    block_size=4,
    check_invariants=True,
)


def make_tokenizer() -> Tokenizer:
    """One token a letter."""
    vocab = {"<eos>": 0} | {letter: i + 1 for i, letter in enumerate(LETTERS)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<eos>"])
    return Tokenizer(raw)


TOKENIZER = make_tokenizer()


def make_parts() -> Parts:
    session = FakeSession(SessionOptions(CONFIG.max_num_seqs, CONFIG.capacity), vocab_size=VOCAB)
    engine = Engine(session, CONFIG, vocab_size=VOCAB, eos_token_ids=(0,))
    return Parts(engine, CONFIG, TOKENIZER, SamplingParams())


@dataclass(frozen=True)
class Visitor:
    """One request of a mix: when it comes, what it asks, after how many results it leaves."""

    delay: int
    prompt: list[int]
    params: SamplingParams
    leaves_after: int | None
    how: Literal["abort", "drop"]


def make_visitor(rng: random.Random) -> Visitor:
    prefix = rng.choice([[], [7] * 9, list(range(20))])
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.0, 0.9]),
        seed=rng.randrange(1000),
        n=rng.choice([1, 1, 1, 2]),
        max_tokens=rng.randint(1, 20),
        min_tokens=rng.choice([0, 0, 1]),
        stop=rng.choice([(), (), ("a",), ("qr", "z")]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        top_k=rng.choice([0, 5]),
        ignore_eos=rng.random() < 0.5,
    )
    return Visitor(
        delay=rng.randrange(12),
        prompt=prefix + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))],
        params=params,
        leaves_after=rng.choice([None, None, rng.randint(1, 5)]),
        how=rng.choice(["abort", "drop"]),
    )


async def visit(llm: AsyncLLM, visitor: Visitor) -> RequestOutput:
    """The last result seen. On the way deltas have to add up."""
    for _ in range(visitor.delay):
        await asyncio.sleep(0.001)
    stream = await llm.submit(params=visitor.params, prompt_token_ids=visitor.prompt)
    shown, seen = [""] * visitor.params.n, 0
    async for result in stream:
        seen += 1
        shown = [a + c.delta for a, c in zip(shown, result.outputs, strict=True)]
        assert shown == [c.text for c in result.outputs]
        if seen == visitor.leaves_after and visitor.how == "abort":
            await stream.abort()
        elif seen == visitor.leaves_after:
            break
    return result


def alone(visitor: Visitor) -> RequestOutput:
    """The same request with an engine to itself."""
    with LLM.from_parts(make_parts()) as llm:
        return llm.generate(params=visitor.params, prompt_token_ids=[visitor.prompt])[0]


def check(visitor: Visitor, choice: CompletionOutput, whole: CompletionOutput) -> None:
    if choice.finish_reason in ("stop", "length"):
        assert replace(choice, delta="") == replace(whole, delta="")
        return
    assert visitor.leaves_after is not None
    assert whole.token_ids[: len(choice.token_ids)] == choice.token_ids
    if choice.finish_reason == "abort":
        assert choice.text == TOKENIZER.decode(choice.token_ids)
    else:
        assert whole.text.startswith(choice.text)


@pytest.mark.parametrize("seed", range(50))
def test_any_mix_is_answered_as_if_each_request_were_alone(seed: int) -> None:
    rng = random.Random(seed)
    visitors = [make_visitor(rng) for _ in range(rng.randint(2, 7))]

    async def mix() -> list[RequestOutput]:
        async with AsyncLLM.from_parts(make_parts()) as llm:
            results = await asyncio.gather(*(visit(llm, v) for v in visitors))
            stats = await llm.stats()
            assert (stats.running, stats.waiting, stats.slots_used) == (0, 0, 0)
            return results

    for visitor, result in zip(visitors, asyncio.run(mix()), strict=True):
        pairs = zip(result.outputs, alone(visitor).outputs, strict=True)
        for choice, whole in pairs:
            check(visitor, choice, whole)
