"""Requests with a grammar, served by the engine over the fake session.

The grammars here are lists of texts, so that all tokens that may come next are found by trying
each one. The reference knows nothing of masks and states: it computes the logits of every prefix
from nothing and takes the best token with which the text begins one of the texts.
"""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.fake import F32, FakeSession
from trtllm_lite.runtime.config import EngineConfig, Speculation
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import RequestError, StepError
from trtllm_lite.runtime.grammar import Bools
from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.sampler import SequenceSampler
from trtllm_lite.runtime.sampling_params import SamplingParams

TEXTS = [*"abc", "aa", "ab", "ba", "bc", "ca", "abc", "bca", "cab", ""]
VOCAB, EOS, MARK = len(TEXTS) + 1, len(TEXTS), len(TEXTS) - 1
"""MARK is a special token: it stands for no text, and these grammars never name it."""

words = st.lists(st.text("abc", min_size=1, max_size=7), min_size=1, max_size=4, unique=True)


@dataclass(frozen=True)
class OneOf:
    """A grammar: one of these texts."""

    texts: tuple[str, ...]
    usable: bool = True
    states: "weakref.WeakSet[Begun]" = field(default_factory=weakref.WeakSet, compare=False)

    def start(self) -> "Begun":
        state = Begun(self)
        self.states.add(state)
        return state

    def is_special(self, token_id: int) -> bool:
        return token_id in (MARK, EOS)

    def continues(self, text: str, token_id: int) -> bool:
        added = TEXTS[token_id] if token_id < EOS else ""
        return bool(added) and any(t.startswith(text + added) for t in self.texts)


class Begun:
    def __init__(self, grammar: OneOf) -> None:
        self._grammar = grammar
        self.text = ""

    def allowed(self) -> Bools:
        fits = [self._grammar.continues(self.text, t) for t in range(VOCAB)]
        return np.array(fits, np.bool_)

    def may_stop(self) -> bool:
        return self.text in self._grammar.texts

    def advance(self, token_id: int) -> None:
        if not self._grammar.continues(self.text, token_id):
            raise StepError(f"token {token_id} does not continue {self.text!r}")
        self.text += TEXTS[token_id]


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})


@dataclass
class Serving:
    """An engine, its session, and all events so far."""

    slots: int = 4
    kv_tokens: int = 400
    speculation: Speculation = "off"
    events: list[TokenEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = EngineConfig(
            self.slots,
            64,
            16,
            self.kv_tokens,
            block_size=4,
            speculation=self.speculation,
            check_invariants=True,
        )
        self.session = FakeSession(SessionOptions(self.slots, config.capacity), vocab_size=VOCAB)
        self.engine = Engine(self.session, config, vocab_size=VOCAB, eos_token_ids=(EOS,))

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        grammar: OneOf | None = None,
    ) -> None:
        self.engine.add(Request(name, tuple(prompt), params or greedy(), 0.0, grammar))

    def finish(self) -> "Serving":
        while self.engine.has_unfinished:
            self.events += self.engine.step()
        return self

    def of(self, name: str, index: int = 0) -> list[TokenEvent]:
        return [e for e in self.events if (e.request_id, e.index) == (name, index)]

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [e.token_id for e in self.of(name, index) if e.token_id is not None]

    def text(self, name: str, index: int = 0) -> str:
        return "".join(TEXTS[t] for t in self.tokens(name, index) if t != EOS)


def logits_after(token_ids: Sequence[int]) -> F32:
    return FakeSession(SessionOptions(1, 80), vocab_size=VOCAB).reference(token_ids)


def expected(
    prompt: Sequence[int], texts: Sequence[str] | None, count: int = 12, penalty: float = 0.0
) -> list[int]:
    """The greedy tokens of a prompt: any, or those that write one of `texts`. `penalty` is both the
    presence and the frequency penalty."""
    new: list[int] = []
    text = ""
    while len(new) < count and EOS not in new:
        logits = logits_after([*prompt, *new])
        fits = list(range(VOCAB))
        if texts is not None:
            fits = [t for t in range(MARK) if any(w.startswith(text + TEXTS[t]) for w in texts)]
            fits += [EOS] if text in texts else []
        cost = {t: penalty * (new.count(t) + (t in new)) for t in fits}
        new.append(max(fits, key=lambda t: float(logits[t]) - cost[t]))
        text += TEXTS[new[-1]] if new[-1] != EOS else ""
    return new


prompts = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=9)


@given(st.lists(st.tuples(prompts, st.none() | words), min_size=1, max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_constrained_and_free_rows_get_what_each_gets_alone(
    calls: list[tuple[list[int], list[str] | None]], crowded: bool
) -> None:
    """Also when there is not memory for all of them, and the youngest are computed again."""
    serving = Serving(kv_tokens=24 if crowded else 400)
    for i, (prompt, texts) in enumerate(calls):
        grammar = None if texts is None else OneOf(tuple(texts))
        serving.add(str(i), prompt, grammar=grammar)
    serving.finish()
    for i, (prompt, texts) in enumerate(calls):
        tokens = serving.tokens(str(i))
        assert tokens == expected(prompt, texts)
        if texts is not None:
            assert serving.text(str(i)) in texts
            assert serving.of(str(i))[-1].finish_reason == "stop"


def test_a_preempted_sequence_keeps_its_place_in_the_grammar() -> None:
    texts = ("abcabcabcabcab", "cabcabcabcabca")
    serving = Serving(kv_tokens=34)
    for i in range(4):
        serving.add(str(i), [i, i + 1, 7], greedy(max_tokens=20), OneOf(texts))
    serving.finish()
    assert serving.engine.stats().preemptions > 0
    for i in range(4):
        assert serving.tokens(str(i)) == expected([i, i + 1, 7], texts, 20)
        assert serving.text(str(i)) in texts


def test_drafts_are_checked_against_the_grammar_token_by_token() -> None:
    """Texts that repeat themselves get drafts, some of which the grammar would not let pass."""
    accepted, drafted = 0, 0
    for seed in range(12):
        texts = ("ab" * 9 + "c", "abc" * 8, "a" * 20 + "ca")
        prompt = [0, 1, 0, 1, 0, 1, 2, 0, 1, seed % 11]
        serving = Serving(speculation="ngram")
        serving.add("a", prompt, greedy(max_tokens=40), OneOf(texts))
        serving.finish()
        assert serving.tokens("a") == expected(prompt, texts, 40)
        stats = serving.engine.stats()
        accepted, drafted = accepted + stats.accepted_tokens, drafted + stats.draft_tokens
    assert 0 < accepted < drafted


def sampled(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.5, "seed": 7, "max_tokens": 12, **params})


def test_each_choice_has_its_own_place_in_the_grammar() -> None:
    texts = ("abc", "bca", "cab", "aabb", "ccab")
    alone, crowd = Serving(), Serving(slots=3)
    alone.add("a", [1, 2], sampled(n=6), OneOf(texts))
    crowd.add("x", [5, 6], sampled(seed=9), OneOf(("bbb",)))
    crowd.add("a", [1, 2], sampled(n=6), OneOf(texts))
    crowd.add("y", [1, 2], sampled(seed=3, max_tokens=9))
    for serving in (alone, crowd):
        serving.finish()
    written = [alone.text("a", i) for i in range(6)]
    assert set(written) <= set(texts)
    assert len(set(written)) > 1
    assert [crowd.tokens("a", i) for i in range(6)] == [alone.tokens("a", i) for i in range(6)]


def test_sampling_draws_among_the_allowed_tokens_only() -> None:
    """Against the distribution written out: the softmax over what fits, as often as it says."""
    texts = ("a", "b", "ca")
    logits = logits_after([3, 4]).astype(np.float64)
    fits = [t for t in range(MARK) if any(w.startswith(TEXTS[t]) for w in texts)]
    wanted = np.exp(logits[fits] / 2.0)
    wanted /= wanted.sum()
    counts = np.zeros(VOCAB)
    for seed in range(4000):
        sampler = SequenceSampler(
            SamplingParams(temperature=2.0),
            [3, 4],
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            index=0,
            seed=seed,
            grammar=OneOf(texts),
        )
        counts[sampler.sample(logits.astype(np.float32)).token_id] += 1
    assert counts.sum() == counts[fits].sum()
    # Five standard deviations of a share of 4,000.
    np.testing.assert_allclose(counts[fits] / 4000, wanted, atol=5 * 0.5 / 4000**0.5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_chooses_among_the_allowed_and_lets_nothing_else_in(temperature: float) -> None:
    params = sampled(temperature=temperature, logit_bias={2: 100.0, MARK: 100.0, EOS: 100.0})
    serving = Serving()
    serving.add("a", [1], params, OneOf(("abc", "cab", "b")))
    serving.finish()
    assert serving.tokens("a") == [2, *serving.tokens("a")[1:]]
    assert serving.text("a") == "cab"


def test_no_end_before_min_tokens_where_the_text_can_go_on() -> None:
    texts = ("a", "aa", "aaa", "aaaaaaaa")
    bias = {EOS: 100.0, **{t: -100.0 for t in range(MARK) if len(TEXTS[t]) > 1}}
    for minimum in (0, 1, 2, 3):
        serving = Serving()
        serving.add("a", [1], greedy(min_tokens=minimum, logit_bias=bias), OneOf(texts))
        serving.finish()
        assert serving.text("a") == "a" * max(1, minimum)


def test_min_tokens_gives_way_where_only_the_end_may_follow() -> None:
    serving = Serving()
    serving.add("a", [1], greedy(min_tokens=9), OneOf(("ab",)))
    serving.finish()
    assert serving.text("a") == "ab"
    assert serving.of("a")[-1].finish_reason == "stop"


def test_a_stop_token_is_an_end_and_no_part_of_the_text() -> None:
    """Token 1 is "b". It is never written to continue a text, and may end each whole one."""
    texts = ("ab", "abc", "bca")
    for prompt in range(9):
        serving = Serving()
        params = greedy(stop_token_ids=(1,), logit_bias={1: 100.0})
        serving.add("a", [prompt], params, OneOf(texts))
        serving.finish()
        *before, last = serving.tokens("a")
        assert (last, serving.of("a")[-1].stop_reason) == (1, 1)
        assert "".join(TEXTS[t] for t in before) in texts
        assert 1 not in before


def test_a_text_that_needs_a_token_that_ends_it_is_an_error_of_its_row_alone() -> None:
    serving = Serving()
    serving.add("a", [1], greedy(stop_token_ids=(1,)), OneOf(("bb",)))
    serving.add("b", [2], greedy(), OneOf(("bb",)))
    serving.finish()
    last = serving.of("a")[-1]
    assert last.finish_reason == "error"
    assert "the grammar allows no further token" in str(last.error)
    assert serving.tokens("b") == expected([2], ("bb",))


def test_a_state_that_fails_ends_its_row_alone() -> None:
    @dataclass(frozen=True)
    class Failing(OneOf):
        def start(self) -> Begun:
            raise StepError("too complex")

    serving = Serving()
    serving.add("a", [1], grammar=Failing(("a",)))
    serving.add("b", [2], grammar=OneOf(("bb",)))
    serving.finish()
    assert [e.error for e in serving.of("a")] == ["too complex"]
    assert serving.text("b") == "bb"


def test_an_answer_cut_short_is_the_beginning_of_a_text() -> None:
    serving = Serving()
    serving.add("a", [1], greedy(max_tokens=2), OneOf(("abcabcabcabc",)))
    serving.finish()
    assert "abcabcabcabc".startswith(serving.text("a"))
    assert len(serving.tokens("a")) == 2
    assert serving.of("a")[-1].finish_reason == "length"


def test_logprobs_are_those_of_the_model_without_the_grammar() -> None:
    texts = ("bca", "ab")
    serving = Serving()
    serving.add("a", [1, 2], greedy(logprobs=3), OneOf(texts))
    serving.finish()
    ids = [1, 2]
    assert serving.tokens("a") == expected(ids, texts)
    for event in serving.of("a"):
        logits = logits_after(ids).astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        assert event.logprobs is not None
        best = [int(t) for t in np.argsort(-exact, kind="stable")[:3]]
        assert next(iter(event.logprobs)) == event.token_id
        assert set(best) <= set(event.logprobs)
        for token, (value, _) in event.logprobs.items():
            assert value == pytest.approx(exact[token], abs=1e-5)
        assert event.token_id is not None
        ids.append(event.token_id)


def test_penalties_come_after_the_mask() -> None:
    """They choose between spellings, and cannot take the only token that is allowed."""
    params = greedy(frequency_penalty=2.0, presence_penalty=2.0, max_tokens=30)
    texts = ("a" * 20,), ("bbbb",), ("abcabcabcabcabc", "cabcabcabc")
    serving = Serving()
    for i, each in enumerate(texts):
        serving.add(str(i), [0], params, OneOf(each))
    serving.finish()
    for i, each in enumerate(texts):
        assert serving.tokens(str(i)) == expected([0], each, 30, penalty=2.0)
        assert serving.text(str(i)) in each
    assert expected([0], texts[0], 30, penalty=2.0) != expected([0], texts[0], 30)


def test_an_aborted_sequence_leaves_no_state() -> None:
    grammar = OneOf(("abcabcabcabcabc",))
    serving = Serving()
    serving.add("a", [1], greedy(n=2), grammar)
    serving.add("b", [2], greedy(), grammar)
    for _ in range(3):
        serving.events += serving.engine.step()
    assert len(grammar.states) == 3
    serving.engine.abort("a")
    gc.collect()
    assert len(grammar.states) == 1
    serving.finish()
    gc.collect()
    assert len(grammar.states) == 0
    assert serving.engine._sampler._samplers == {}


def test_a_waiting_sequence_has_no_state_yet() -> None:
    grammar = OneOf(("abc",))
    serving = Serving(slots=1)
    for name in "abcd":
        serving.add(name, [1], grammar=grammar)
    serving.events += serving.engine.step()
    assert len(grammar.states) == 1


def test_parameters_with_a_grammar_that_nobody_compiled_are_refused() -> None:
    serving = Serving()
    spec = GrammarSpec.choice(["a"], param="guided_choice")
    with pytest.raises(RequestError, match=r"^guided_choice: the request holds no compiled"):
        serving.add("a", [1], greedy(grammar=spec))
    assert not serving.engine.has_unfinished
