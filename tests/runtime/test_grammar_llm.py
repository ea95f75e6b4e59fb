"""Grammars from parameters to text: `LLM` and `AsyncLLM` over the fake session and llguidance."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.grammar_compiler import CachedCompiler, open_llguidance
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.llm import LLM
from trtllm_lite.runtime.loading import Parts
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.tokenizer import Tokenizer

CONFIG = EngineConfig(
    max_num_seqs=4,
    max_model_len=300,
    max_num_batched_tokens=16,
    max_kv_tokens=1200,
    block_size=4,
    check_invariants=True,
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=250)


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    return Tokenizer(raw, eos_token_ids=[0], chat_template="{{ messages[0].content }}")


TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.vocab_size + 7


def make_parts(*, grammars: bool = True) -> Parts:
    session = FakeSession(SessionOptions(CONFIG.max_num_seqs, CONFIG.capacity), vocab_size=VOCAB)
    engine = Engine(session, CONFIG, vocab_size=VOCAB, eos_token_ids=(0,))
    compiler = CachedCompiler(lambda: open_llguidance(TOKENIZER.to_json(), VOCAB, (0,)))
    return Parts(engine, CONFIG, TOKENIZER, GREEDY, grammars=compiler if grammars else None)


def constrained(spec: GrammarSpec, **params: Any) -> SamplingParams:
    return replace(GREEDY, grammar=spec, **params)


def test_answers_are_what_was_asked_for_side_by_side() -> None:
    asked = [
        constrained(GrammarSpec.json_schema(SCHEMA)),
        constrained(GrammarSpec.regex(r"[0-9]{3}-[a-f]{2,9}")),
        constrained(GrammarSpec.choice(["yes", "no", "perhaps"])),
        replace(GREEDY, max_tokens=20),
        constrained(GrammarSpec.json_schema(SCHEMA), temperature=1.0, seed=5, n=3),
    ]
    with LLM.from_parts(make_parts()) as llm:
        results = llm.generate(["tell me"] * len(asked), asked)
        alone = [llm.generate("tell me", params)[0] for params in asked]
    texts = [[choice.text for choice in result.outputs] for result in results]
    for text in (*texts[0], *texts[4]):
        jsonschema.validate(json.loads(text), SCHEMA)
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2,9}", texts[1][0])
    assert texts[2][0] in ("yes", "no", "perhaps")
    assert texts == [[choice.text for choice in result.outputs] for result in alone]
    reasons = {c.finish_reason for r in (*results[:3], results[4]) for c in r.outputs}
    assert reasons == {"stop"}


def test_a_stop_string_ends_the_text_wherever_it_is() -> None:
    spec = GrammarSpec.regex("abcab[0-9]{40}")
    with LLM.from_parts(make_parts()) as llm:
        (cut,) = llm.generate("x", constrained(spec, stop="ca"))
        (kept,) = llm.generate("x", constrained(spec, stop="ca", include_stop_str_in_output=True))
        (late,) = llm.generate("x", constrained(spec, stop="ab", min_tokens=4))
        stats = llm.stats()
    assert [r.outputs[0].text for r in (cut, kept, late)] == ["ab", "abca", "abc"]
    assert {r.outputs[0].finish_reason for r in (cut, kept, late)} == {"stop"}
    assert (stats.running, stats.waiting, stats.slots_used) == (0, 0, 0)


def test_a_stream_gives_the_same_text_in_pieces() -> None:
    params = constrained(GrammarSpec.json_schema(SCHEMA), logprobs=0)
    with LLM.from_parts(make_parts()) as llm:
        (whole,) = llm.generate("tell me", params)
        pieces = [result.outputs[0].delta for result in llm.stream("tell me", params)]
    assert "".join(pieces) == whole.outputs[0].text


def test_an_answer_cut_by_its_length_is_the_beginning_of_one() -> None:
    with LLM.from_parts(make_parts()) as llm:
        (result,) = llm.generate("x", constrained(GrammarSpec.json_object(), max_tokens=1))
    assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("{", "length")


def test_a_grammar_that_cannot_be_compiled_is_refused_before_any_work() -> None:
    spec = GrammarSpec.json_schema({"not": {}}, param="response_format")
    with LLM.from_parts(make_parts()) as llm:
        with pytest.raises(RequestError, match=r"^response_format: .*not"):
            llm.generate(["x", "y"], [GREEDY, constrained(spec)])
        assert llm.stats().steps == 0


def test_without_a_compiler_a_grammar_is_refused() -> None:
    spec = GrammarSpec.json_object(param="response_format")
    with (
        LLM.from_parts(make_parts(grammars=False)) as llm,
        pytest.raises(RequestError, match=r"^response_format: the bundle has no tokenizer"),
    ):
        llm.generate("x", constrained(spec))


def test_tasks_of_an_event_loop_share_a_grammar_and_not_its_state() -> None:
    async def serve() -> list[str]:
        async with AsyncLLM.from_parts(make_parts()) as llm:
            params = constrained(GrammarSpec.json_schema(SCHEMA), temperature=1.0)
            calls = [llm.generate(f"tell {i}", replace(params, seed=i)) for i in range(8)]
            return [result.outputs[0].text for result in await asyncio.gather(*calls)]

    texts = asyncio.run(serve())
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_an_aborted_answer_leaves_the_others_theirs() -> None:
    async def serve() -> str:
        async with AsyncLLM.from_parts(make_parts()) as llm:
            params = constrained(GrammarSpec.json_schema(SCHEMA))
            gone = await llm.submit("tell me", params)
            await anext(gone)
            kept = asyncio.ensure_future(llm.generate("tell me", params))
            await llm.abort(gone.request_id)
            return (await kept).outputs[0].text

    jsonschema.validate(json.loads(asyncio.run(serve())), SCHEMA)
