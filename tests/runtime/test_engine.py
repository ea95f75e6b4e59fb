"""The engine over the fake session: what requests get, against slow references."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import ContextLengthError, EngineDeadError, RequestError
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.sampler import SequenceSampler
from trtllm_lite.runtime.sampling_params import SamplingParams

VOCAB, EOS = 61, 60


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})


@dataclass
class Serving:
    """An engine, its session, and all events so far."""

    slots: int = 4
    model_len: int = 64
    budget: int = 32
    kv_tokens: int = 256
    store: int = 10**6
    recompute_at: int | None = None
    events: list[TokenEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = EngineConfig(
            self.slots,
            self.model_len,
            self.budget,
            self.kv_tokens,
            prefix_cache_bytes=self.store,
            block_size=4,
            check_invariants=True,
        )
        options = SessionOptions(self.slots, config.capacity)
        self.session = FakeSession(options, vocab_size=VOCAB, recompute_at=self.recompute_at)
        self.engine = Engine(
            self.session,
            config,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            recompute_at=self.recompute_at,
        )

    def add(self, name: str, prompt: Iterable[int], params: SamplingParams | None = None) -> None:
        self.engine.add(Request(name, tuple(prompt), params or greedy()))

    def steps(self, count: int) -> list[TokenEvent]:
        new = [event for _ in range(count) for event in self.engine.step()]
        self.events += new
        return new

    def finish(self) -> None:
        while self.engine.has_unfinished:
            self.steps(1)

    def of(self, name: str, index: int = 0) -> list[TokenEvent]:
        return [e for e in self.events if (e.request_id, e.index) == (name, index)]

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [e.token_id for e in self.of(name, index) if e.token_id is not None]

    def alone(self, prompt: Iterable[int], count: int) -> list[int]:
        """Greedy tokens from the reference alone."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.session.reference(ids).argmax()))
        return ids[-count:]


def test_a_request_gets_its_greedy_tokens_one_a_step() -> None:
    serving = Serving()
    serving.add("a", [1, 2, 3], greedy(max_tokens=5))
    assert [len(serving.steps(1)) for _ in range(5)] == [1] * 5
    assert serving.tokens("a") == serving.alone([1, 2, 3], 5)
    assert [e.finish_reason for e in serving.of("a")] == [None] * 4 + ["length"]
    assert not serving.engine.has_unfinished


@pytest.mark.parametrize(
    ("params", "last", "reason", "stop_reason"),
    [
        ({"logit_bias": {EOS: 100.0}, "ignore_eos": False}, EOS, "stop", None),
        ({"logit_bias": {EOS: 100.0}}, EOS, "length", None),
        ({"logit_bias": {EOS: 100.0}, "stop_token_ids": (EOS,)}, EOS, "stop", EOS),
        ({"logit_bias": {7: 100.0}, "stop_token_ids": (5, 7)}, 7, "stop", 7),
        ({"logit_bias": {7: 100.0}, "stop_token_ids": (5,)}, 7, "length", None),
        ({"logit_bias": {7: 100.0}, "stop_token_ids": (7,), "max_tokens": 1}, 7, "stop", 7),
    ],
)
def test_how_a_sequence_ends(
    params: dict[str, Any], last: int, reason: str, stop_reason: int | None
) -> None:
    serving = Serving()
    serving.add("a", [1, 2], greedy(**{"max_tokens": 3, **params}))
    serving.finish()
    event = serving.of("a")[-1]
    assert (event.token_id, event.finish_reason, event.stop_reason) == (last, reason, stop_reason)
    assert len(serving.of("a")) == (3 if reason == "length" else 1)


def test_no_end_token_before_min_tokens() -> None:
    serving = Serving()
    bias = {EOS: 100.0, 7: 90.0}
    serving.add(
        "a", [1], greedy(logit_bias=bias, ignore_eos=False, stop_token_ids=(7,), min_tokens=3)
    )
    serving.finish()
    tokens = serving.tokens("a")
    assert not {EOS, 7} & set(tokens[:3])
    assert (tokens[3:], serving.of("a")[-1].finish_reason) == ([EOS], "stop")


@pytest.mark.parametrize(("model_len", "kv_tokens"), [(9, 99), (99, 9)])
def test_without_max_tokens_a_sequence_fills_the_context(model_len: int, kv_tokens: int) -> None:
    serving = Serving(model_len=model_len, kv_tokens=kv_tokens)
    serving.add("a", [1, 2, 3], greedy(max_tokens=None))
    serving.finish()
    assert serving.tokens("a") == serving.alone([1, 2, 3], 6)
    assert serving.of("a")[-1].finish_reason == "length"


def test_preempted_sequences_get_the_tokens_they_would_get_alone() -> None:
    for store in (0, 10**6):
        serving = Serving(kv_tokens=40, store=store)
        prompts = {name: [i, i + 1, i + 2, 9] for i, name in enumerate("abcd")}
        for name, prompt in prompts.items():
            serving.add(name, prompt, greedy(max_tokens=30))
        serving.finish()
        assert serving.engine.stats().preemptions > 0
        for name, prompt in prompts.items():
            assert serving.tokens(name) == serving.alone(prompt, 30)


@pytest.mark.parametrize("prompt_length", [3, 7, 8, 9])
def test_crossing_into_the_other_rope_regime_computes_everything_again(prompt_length: int) -> None:
    serving = Serving(recompute_at=8)
    prompts = {"a": range(prompt_length), "b": range(1, 6), "c": range(5)}
    for name, prompt in prompts.items():
        serving.add(name, prompt, greedy(max_tokens=12))
    serving.finish()
    for name, prompt in prompts.items():
        assert serving.tokens(name) == serving.alone(prompt, 12)


def test_a_prefix_is_taken_from_the_store_and_reported() -> None:
    serving = Serving()
    prompt = list(range(10))
    serving.add("a", prompt)
    serving.finish()
    serving.add("b", prompt)
    serving.finish()
    assert [e.cached_tokens for e in (*serving.of("a")[:1], *serving.of("b")[:1])] == [0, 8]
    assert serving.tokens("b") == serving.tokens("a")
    stats = serving.engine.stats()
    block = 4 * serving.session.info.kv_bytes_per_token
    assert stats.prefix_hit_tokens == 8
    # 25 tokens have been computed: six full blocks
    assert stats.prefix_store_bytes == 6 * block


def test_choices_share_the_prompt_and_differ_in_their_random_streams() -> None:
    serving = Serving(slots=2)
    params = SamplingParams(n=3, temperature=3.0, seed=5, max_tokens=8, ignore_eos=True)
    serving.add("a", range(9), params)
    serving.finish()
    choices = [serving.tokens("a", i) for i in range(3)]
    assert len({tuple(c) for c in choices}) == 3
    assert [serving.of("a", i)[0].cached_tokens for i in range(3)] == [0, 8, 8]
    for index, tokens in enumerate(choices):
        assert tokens == sampled_alone(serving.session, range(9), params, 5, index)


def sampled_alone(
    session: FakeSession, prompt: Iterable[int], params: SamplingParams, seed: int, index: int
) -> list[int]:
    ids = list(prompt)
    sampler = SequenceSampler(
        params, ids, vocab_size=VOCAB, eos_token_ids=(EOS,), index=index, seed=seed
    )
    count = params.max_tokens or 0
    for _ in range(count):
        ids.append(sampler.sample(session.reference(ids)).token_id)
    return ids[-count:]


def test_a_seed_gives_the_same_tokens_in_any_company_and_through_preemption() -> None:
    params = SamplingParams(temperature=3.0, seed=-3, max_tokens=16, ignore_eos=True)
    alone, crowd = Serving(), Serving(kv_tokens=44, budget=5, store=0)
    alone.add("x", range(6), params)
    alone.finish()
    for name in ("p", "q", "x", "r"):
        crowd.add(name, range(6) if name == "x" else range(2, 7), params)
    crowd.finish()
    assert crowd.engine.stats().preemptions > 0
    assert crowd.tokens("x") == alone.tokens("x")
    assert alone.tokens("x") == sampled_alone(alone.session, range(6), params, -3, 0)


def test_without_a_seed_requests_differ() -> None:
    serving = Serving()
    params = SamplingParams(temperature=50.0, max_tokens=30, ignore_eos=True)
    for name in "ab":
        serving.add(name, [1, 2], params)
    serving.finish()
    assert serving.tokens("a") != serving.tokens("b")


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    result: np.ndarray[Any, Any] = shifted - np.log(np.exp(shifted).sum())
    return result


def test_logprobs_are_those_of_the_reference() -> None:
    serving = Serving()
    serving.add("a", [1, 2, 3], greedy(logprobs=2, max_tokens=4))
    serving.finish()
    ids = [1, 2, 3]
    for event in serving.of("a"):
        assert event.token_id is not None
        wanted = log_softmax(serving.session.reference(ids))
        assert event.logprobs is not None
        assert list(event.logprobs) == np.argsort(-wanted)[:2].tolist()
        logprob, rank = event.logprobs[event.token_id]
        assert logprob == pytest.approx(wanted.max(), abs=1e-5)
        assert rank == 1
        ids.append(event.token_id)


@pytest.mark.parametrize("length", [1, 2, 33, 65, 80])
def test_prompt_logprobs_of_every_token_in_any_chunks_and_cached_or_not(length: int) -> None:
    serving = Serving(model_len=100, budget=40)
    prompt = [i * i % 50 for i in range(length)]
    serving.add("warm", prompt, greedy(max_tokens=2))
    serving.finish()
    serving.add("a", prompt, greedy(max_tokens=3, prompt_logprobs=1))
    serving.finish()
    first, *others = serving.of("a")
    assert [e.prompt_logprobs for e in others] == [None, None]
    assert first.prompt_logprobs is not None
    assert (len(first.prompt_logprobs), first.prompt_logprobs[0]) == (length, None)
    assert first.cached_tokens == 0
    for i, entry in enumerate(first.prompt_logprobs[1:], start=1):
        wanted = log_softmax(serving.session.reference(prompt[:i]))
        assert entry is not None
        assert next(iter(entry)) == prompt[i]
        assert entry[prompt[i]][0] == pytest.approx(wanted[prompt[i]], abs=1e-5)
    assert serving.tokens("a") == serving.alone(prompt, 3)


def test_prompt_logprobs_survive_preemption_in_mid_prefill() -> None:
    serving = Serving(kv_tokens=50, budget=4, model_len=60)
    prompt = list(range(40))
    serving.add("old", [9, 8, 7], greedy(max_tokens=40))
    serving.steps(1)
    serving.add("a", prompt, greedy(max_tokens=2, prompt_logprobs=0, n=2))
    serving.finish()
    assert serving.engine.stats().preemptions > 0
    found = serving.of("a")[0].prompt_logprobs
    assert found is not None
    assert [e and next(iter(e)) for e in found] == [None, *prompt[1:]]
    assert all(e.prompt_logprobs is None for e in serving.of("a", 1))


def test_what_can_never_be_served_is_refused_and_forgotten() -> None:
    serving = Serving(model_len=20)
    with pytest.raises(ContextLengthError, match="maximum context length is 20 tokens"):
        serving.add("a", range(15), greedy(max_tokens=6))
    assert not serving.engine.has_unfinished
    serving.add("a", range(15), greedy(max_tokens=5))


def test_a_request_id_is_in_use_until_its_last_choice_has_ended() -> None:
    serving = Serving(slots=1)
    serving.add("a", [1], greedy(max_tokens=1, n=2))
    serving.steps(1)
    with pytest.raises(RequestError, match="request_id: got 'a', which is in use"):
        serving.add("a", [1])
    serving.finish()
    serving.add("a", [1])


def test_abort_frees_the_slot_at_once() -> None:
    serving = Serving(slots=1)
    serving.add("a", [1, 2], greedy(n=2))
    serving.add("b", [3, 4], greedy(max_tokens=2))
    serving.steps(2)
    ended = serving.engine.abort("a")
    assert [(e.index, e.token_id, e.finish_reason) for e in ended] == [
        (0, None, "abort"),
        (1, None, "abort"),
    ]
    assert serving.engine.stats().slots_used == 0
    assert [e.request_id for e in serving.steps(1)] == ["b"]
    serving.finish()
    assert serving.tokens("b") == serving.alone([3, 4], 2)


def test_aborting_what_is_not_there_is_no_error() -> None:
    serving = Serving()
    assert serving.engine.abort("nobody") == []


def test_stop_ends_one_choice_before_the_next_step_without_an_event() -> None:
    serving = Serving()
    serving.add("a", [1, 2, 3], greedy(n=2, max_tokens=6))
    serving.steps(3)
    serving.engine.stop("a", 0, "text")
    assert serving.engine.stats().running == 1
    serving.engine.stop("a", 0, "text")
    serving.engine.stop("b", 0, "text")
    serving.finish()
    assert [e.finish_reason for e in serving.of("a", 0)] == [None] * 3
    assert serving.of("a", 1)[-1].finish_reason == "length"
    assert dict(serving.engine.stats().finished) == {"stop": 1, "length": 1}


def test_nothing_is_left_of_what_has_ended() -> None:
    serving = Serving()
    serving.add("a", range(9), greedy(max_tokens=2, n=2, prompt_logprobs=1))
    serving.add("b", range(30, 39), greedy(prompt_logprobs=1))
    serving.steps(1)
    serving.engine.abort("b")
    serving.finish()
    sampler = serving.engine._sampler
    assert (sampler._samplers, sampler._prompts) == ({}, {})
    assert np.isnan(serving.session._pool).all()


def test_stats_count_what_is_there() -> None:
    serving = Serving(slots=2)
    for name in "abc":
        serving.add(name, [1, 2, 3])
    serving.steps(2)
    stats = serving.engine.stats()
    assert (stats.waiting, stats.running, stats.steps) == (1, 2, 2)
    assert (stats.slots_used, stats.slots_total) == (2, 2)
    assert (stats.kv_tokens_used, stats.kv_tokens_total) == (10, 256)


def test_events_say_when_the_sequence_first_got_a_slot() -> None:
    serving = Serving(slots=1)
    for name in "ab":
        serving.add(name, [1], greedy(max_tokens=2))
    serving.finish()
    times = {name: {e.first_scheduled_time for e in serving.of(name)} for name in "ab"}
    (a,), (b,) = times["a"], times["b"]
    assert a is not None
    assert b is not None
    assert a < b
    serving.add("c", [1])
    (event,) = serving.engine.abort("c")
    assert event.first_scheduled_time is None


def test_a_closed_engine_refuses_work() -> None:
    serving = Serving()
    serving.add("a", [1])
    serving.engine.close()
    serving.engine.close()
    assert not serving.engine.has_unfinished
    with pytest.raises(EngineDeadError, match="closed"):
        serving.add("b", [1])
    with pytest.raises(EngineDeadError, match="closed"):
        serving.engine.step()
