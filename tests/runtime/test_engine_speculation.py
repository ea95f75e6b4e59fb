"""Drafts change how many steps a request takes, never its tokens: random traffic with and without.

The reference knows nothing of drafts: it chooses token after token with a sampler of its own, from
the logits of every prefix computed from scratch. The engine checks its books after every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig, Speculation
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import ContextLengthError, RequestError, UsageError
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.request_checks import max_length
from trtllm_lite.runtime.sampler import Sampled, SequenceSampler
from trtllm_lite.runtime.sampling_params import SamplingParams

VOCAB, EOS = 7, 6
"""Few tokens: what a sequence says, it has often said before."""


class Repeating(FakeSession):
    """Its logits depend on all that is cached, as ever, but mostly on the last two tokens, so that
    text repeats itself as text does."""

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        logits = super().run(batch)
        for row in range(batch.rows):
            known = self._known(batch, row)
            for i, position in enumerate(batch.logits_indices[row]):
                logits[row, i] += favour(known[: batch.past_lens[row] + position + 1])
        return logits

    def alone(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return self.reference(token_ids) + favour(token_ids)

    def _known(self, batch: Batch, row: int) -> list[int]:
        """All tokens of a row: those in the cache, found by their entries, and the new ones."""
        past, slot = int(batch.past_lens[row]), batch.first_slot + row
        cached = self._pool[slot, ..., :past, None, :]
        same = np.zeros((past, VOCAB), bool)
        for length in (1, 10**6):
            entries = self.model.keys_values(np.arange(VOCAB), length)[..., None, :, :]
            same |= (cached == entries).all(axis=(0, 1, 2, 5))
        new = batch.token_ids[row, : batch.query_lens[row]]
        return [*same.argmax(axis=1).tolist(), *new.tolist()]


def favour(token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Up to 12 more for one token, by the last two tokens; the model's own logits span 16."""
    last = 3 * token_ids[-1] + (5 * token_ids[-2] if len(token_ids) > 1 else 0)
    added = np.zeros(VOCAB, np.float32)
    added[last % VOCAB] = 12.0
    return added


@dataclass(frozen=True)
class Call:
    """A request, the step of its arrival, and how many steps later it is aborted or stopped."""

    arrival: int
    prompt: tuple[int, ...]
    params: SamplingParams
    abort_after: int | None
    stop_after: int | None


@st.composite
def calls(draw: st.DrawFn) -> Call:
    params: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 3.0])),
        "top_k": draw(st.sampled_from([0, 3])),
        "seed": draw(st.integers(0, 5)),
        "n": draw(st.sampled_from([1, 1, 2])),
        "max_tokens": draw(st.none() | st.integers(1, 40)),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([(), (3,), (4, 5)])),
        "logprobs": draw(st.sampled_from([None, None, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.3])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 1.5])),
        "logit_bias": draw(st.sampled_from([{}, {}, {2: 4.0}])),
        "speculation": draw(st.sampled_from([None, None, True, False])),
    }
    params["min_tokens"] = draw(st.integers(0, min(params["max_tokens"] or 8, 8)))
    prompt = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6)) * draw(st.integers(1, 4))
    return Call(
        draw(st.integers(0, 12)),
        tuple(prompt),
        SamplingParams(**params),
        draw(st.none() | st.none() | st.integers(0, 12)),
        draw(st.none() | st.none() | st.integers(1, 12)),
    )


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    length = draw(st.integers(8, 64))
    return EngineConfig(
        max_num_seqs=draw(st.integers(1, 4)),
        max_model_len=length,
        max_num_batched_tokens=draw(st.integers(1, 40)),
        max_kv_tokens=draw(st.integers(length // 2, 2 * length)),
        enable_prefix_caching=draw(st.booleans()),
        prefix_cache_bytes=draw(st.sampled_from([0, 600, 10**6])),
        block_size=draw(st.integers(1, 5)),
        speculation=draw(st.sampled_from(["ngram", "ngram", "off"])),
        max_draft_tokens=draw(st.sampled_from([1, 2, 5, 16])),
        check_invariants=True,
    )


class Traffic:
    """Plays calls against an engine and keeps what came of them."""

    def __init__(self, config: EngineConfig, recompute_at: int | None, calls: list[Call]) -> None:
        options = SessionOptions(config.max_num_seqs, config.capacity)
        self.config = config
        self.session = Repeating(options, vocab_size=VOCAB, recompute_at=recompute_at)
        self.engine = Engine(
            self.session, config, vocab_size=VOCAB, eos_token_ids=(EOS,), recompute_at=recompute_at
        )
        self.calls = {str(i): call for i, call in enumerate(calls)}
        self.events: dict[tuple[str, int], list[TokenEvent]] = {}
        self.stopped: set[tuple[str, int]] = set()
        self.refused: set[str] = set()

    def play(self) -> None:
        last = max(call.arrival for call in self.calls.values())
        turn = 0
        while turn <= last or self.engine.has_unfinished:
            for name, call in self.calls.items():
                self.act(name, call, turn)
            self.note(self.engine.step())
            turn += 1
            assert turn < 5000

    def act(self, name: str, call: Call, turn: int) -> None:
        age = turn - call.arrival
        if age == 0:
            try:
                self.engine.add(Request(name, call.prompt, call.params))
            except ContextLengthError:
                self.refused.add(name)
        if age == call.abort_after and name not in self.refused:
            self.note(self.engine.abort(name))
        if age == call.stop_after and self.unfinished(name, 0):
            self.engine.stop(name, 0, "text")
            self.stopped.add((name, 0))

    def unfinished(self, name: str, index: int) -> bool:
        known = name not in self.refused and (name, index) not in self.stopped
        return known and not any(e.finish_reason for e in self.events.get((name, index), ()))

    def note(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert self.unfinished(event.request_id, event.index)
            self.events.setdefault((event.request_id, event.index), []).append(event)

    def expected(self, call: Call, index: int) -> list[tuple[Sampled, str | None]]:
        """Every token of the choice alone, and the finish reason that comes with it."""
        ids, params = list(call.prompt), call.params
        sampler = SequenceSampler(
            params, ids, vocab_size=VOCAB, eos_token_ids=(EOS,), index=index, seed=params.seed or 0
        )
        limit = max_length(Request("", call.prompt, params), self.config)
        found = list[tuple[Sampled, str | None]]()
        while not found or found[-1][1] is None:
            sampled = sampler.sample(self.session.alone(ids))
            ids.append(sampled.token_id)
            stops = ids[-1] in params.stop_token_ids or (ids[-1] == EOS and not params.ignore_eos)
            full = len(ids) == limit
            found.append((sampled, "stop" if stops else "length" if full else None))
        return found


@settings(max_examples=150, deadline=None)
@given(
    config=configs(),
    recompute_at=st.none() | st.integers(2, 40),
    calls=st.lists(calls(), min_size=1, max_size=5),
)
def test_drafts_never_change_what_a_request_gets(
    config: EngineConfig, recompute_at: int | None, calls: list[Call]
) -> None:
    traffic = Traffic(config, recompute_at, calls)
    traffic.play()
    for name, call in traffic.calls.items():
        for index in range(call.params.n if name not in traffic.refused else 0):
            check_choice(traffic, name, call, index)
    stats = traffic.engine.stats()
    assert (stats.waiting, stats.running, stats.slots_used, stats.kv_tokens_used) == (0, 0, 0, 0)
    assert 0 <= stats.accepted_tokens <= stats.draft_tokens


def check_choice(traffic: Traffic, name: str, call: Call, index: int) -> None:
    expected = traffic.expected(call, index)
    events = traffic.events.get((name, index), [])
    tokens = [e for e in events if e.token_id is not None]
    for event, (sampled, reason) in zip(tokens, expected, strict=False):
        assert (event.token_id, event.finish_reason) == (sampled.token_id, reason)
        assert event.logprobs == sampled.logprobs
    reasons = [e.finish_reason for e in events if e.finish_reason]
    if (name, index) not in traffic.stopped and reasons != ["abort"]:
        assert len(tokens) == len(expected)
    given = [e.prompt_logprobs is not None for e in tokens]
    wanted = call.params.prompt_logprobs is not None and index == 0
    assert given == [wanted and i == 0 for i in range(len(tokens))]
    on = call.params.speculation
    if on is False or (on is None and traffic.config.speculation == "off"):
        assert all(e.draft_tokens == 0 for e in events)


LOOP = (1, 2, 3, 4, 5, 0, 2, 4)


class Looping(FakeSession):
    """It says LOOP again and again, whatever its slots hold; NaN behind the tokens in `broken`."""

    broken: tuple[int, ...] = ()

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        logits = super().run(batch)
        for row in range(batch.rows):
            for i, position in enumerate(batch.logits_indices[row]):
                place = int(batch.past_lens[row] + position + 1)
                logits[row, i] = np.nan if place in self.broken else 0.0
                logits[row, i, LOOP[place % len(LOOP)]] += 9.0
        return logits


def looping(
    speculation: Speculation = "ngram", *, multi_token: bool = True
) -> tuple[Looping, Engine]:
    config = EngineConfig(4, 200, 64, 800, speculation=speculation, check_invariants=True)
    options = SessionOptions(4, config.capacity)
    session = Looping(options, vocab_size=VOCAB, multi_token_decode=multi_token)
    return session, Engine(session, config, vocab_size=VOCAB, eos_token_ids=(EOS,))


def serve(engine: Engine, **params: Any) -> tuple[list[TokenEvent], int]:
    """All events of a request whose prompt is two rounds of LOOP, and how many steps it took."""
    engine.add(Request("a", LOOP * 2, SamplingParams(temperature=0.0, **params)))
    events, steps = list[TokenEvent](), 0
    while engine.has_unfinished:
        events += engine.step()
        steps += 1
    return events, steps


def test_a_text_that_repeats_takes_fewer_steps_for_the_same_tokens() -> None:
    _, engine = looping()
    drafted, few = serve(engine, max_tokens=100)
    stats = engine.stats()
    plain, many = serve(engine, max_tokens=100, speculation=False)
    assert [e.token_id for e in drafted] == [e.token_id for e in plain]
    assert [e.token_id for e in drafted] == [LOOP[i % len(LOOP)] for i in range(16, 116)]
    assert many == 100
    assert few == 100 - stats.accepted_tokens < 20
    assert drafted[-1].draft_tokens == stats.draft_tokens
    assert drafted[-1].accepted_tokens == stats.accepted_tokens
    assert (plain[-1].draft_tokens, plain[-1].accepted_tokens) == (0, 0)
    assert engine.stats().draft_tokens == stats.draft_tokens
    assert engine._speculator is not None
    assert engine._speculator._drafters == {}


def test_prompt_logprobs_come_once_with_the_first_token() -> None:
    """A prompt of one token more than the budget: drafts come behind it."""
    _, engine = looping()
    prompt = [LOOP[i % len(LOOP)] for i in range(65)]
    params = SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=0)
    engine.add(Request("a", tuple(prompt), params))
    assert engine.step() == []
    events = [*engine.step(), *engine.step(), *engine.step()]
    assert len(events) > 3
    assert [e.prompt_logprobs is not None for e in events] == [True] + [False] * (len(events) - 1)
    first = events[0].prompt_logprobs or []
    assert [None if entry is None else [*entry] for entry in first] == [
        None,
        *([token] for token in prompt[1:]),
    ]


@pytest.mark.parametrize("broken", range(17, 60, 3))
def test_what_goes_wrong_behind_a_token_comes_after_that_token(broken: int) -> None:
    session, engine = looping()
    session.broken = (broken,)
    events, _ = serve(engine, max_tokens=60)
    assert [e.token_id for e in events[:-1]] == [LOOP[i % len(LOOP)] for i in range(16, broken)]
    assert (events[-1].token_id, events[-1].finish_reason) == (None, "error")
    assert "NaN" in str(events[-1].error)
    assert engine.stats().slots_used == 0


def test_drafts_count_against_the_budget_of_a_step() -> None:
    _, engine = looping()
    engine.add(Request("a", LOOP * 2, SamplingParams(temperature=0.0, max_tokens=150)))
    for _ in range(5):
        engine.step()
    engine.add(Request("b", (1,) * 150, SamplingParams(temperature=0.0, max_tokens=1)))
    plan = engine._scheduler.plan()
    assert len(plan.decode[0].draft) > 1
    assert sum(row.num_tokens for row in plan.rows) == 64


def test_without_a_multi_token_graph_speculation_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"speculation: got 'ngram'; .*takes one token at a time"):
        looping(multi_token=False)
    _, engine = looping("off", multi_token=False)
    with pytest.raises(RequestError, match=r"speculation: got True; .*takes one token at a time"):
        engine.add(Request("a", LOOP, SamplingParams(speculation=True)))
    _, steps = serve(engine, max_tokens=20, speculation=False)
    assert (steps, engine.stats().draft_tokens) == (20, 0)
