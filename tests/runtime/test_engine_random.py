"""Batched equals alone: random traffic through small engines, token by token against a reference.

The reference knows nothing of slots, chunks, blocks or batches: it computes the logits of every
prefix of every request from scratch. The engine checks its books after every step.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import ContextLengthError
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.sampling_params import SamplingParams

VOCAB, EOS = 13, 12


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
        "temperature": 0.0,
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "max_tokens": draw(st.none() | st.integers(1, 20)),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([(), (3,)])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
    }
    params["min_tokens"] = draw(st.integers(0, min(params["max_tokens"] or 4, 4)))
    # Two tokens and repetition: many requests share a prefix.
    prompt = draw(st.lists(st.integers(1, 2), min_size=1, max_size=8)) * draw(st.integers(1, 4))
    return Call(
        draw(st.integers(0, 12)),
        tuple(prompt),
        SamplingParams(**params),
        draw(st.none() | st.integers(0, 12)),
        draw(st.none() | st.integers(1, 12)),
    )


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    length = draw(st.integers(8, 48))
    return EngineConfig(
        max_num_seqs=draw(st.integers(1, 4)),
        max_model_len=length,
        max_num_batched_tokens=draw(st.integers(1, 24)),
        max_kv_tokens=draw(st.integers(length // 2, 2 * length)),
        enable_prefix_caching=draw(st.booleans()),
        prefix_cache_bytes=draw(st.sampled_from([0, 600, 2000, 10**6])),
        block_size=draw(st.integers(1, 5)),
        check_invariants=True,
    )


class Traffic:
    """Plays calls against an engine and keeps what came of them."""

    def __init__(self, config: EngineConfig, recompute_at: int | None, calls: list[Call]) -> None:
        options = SessionOptions(config.max_num_seqs, config.capacity)
        self.config = config
        self.session = FakeSession(options, vocab_size=VOCAB, recompute_at=recompute_at)
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
            self.add(name, call)
        if age == call.abort_after and name not in self.refused:
            before = self.engine.stats()
            ended = self.engine.abort(name)
            self.note(ended)
            after = self.engine.stats()
            gone = before.waiting + before.running - after.waiting - after.running
            assert gone == len(ended)
            assert after.slots_used == after.running
        if age == call.stop_after and self.unfinished(name, 0):
            self.engine.stop(name, 0, "text")
            self.stopped.add((name, 0))

    def add(self, name: str, call: Call) -> None:
        try:
            self.engine.add(Request(name, call.prompt, call.params))
        except ContextLengthError:
            self.refused.add(name)

    def unfinished(self, name: str, index: int) -> bool:
        known = name not in self.refused and (name, index) not in self.stopped
        return known and not any(e.finish_reason for e in self.events.get((name, index), ()))

    def note(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert self.unfinished(event.request_id, event.index)
            self.events.setdefault((event.request_id, event.index), []).append(event)

    def expected(self, call: Call) -> list[tuple[int, str | None]]:
        """Every token of the request alone, and the finish reason that comes with it."""
        ids, params, found = list(call.prompt), call.params, list[tuple[int, str | None]]()
        while not found or found[-1][1] is None:
            logits = self.session.reference(ids).copy()
            if len(found) < params.min_tokens:
                logits[[EOS, *params.stop_token_ids]] = -np.inf
            ids.append(int(logits.argmax()))
            stops = ids[-1] in params.stop_token_ids or (ids[-1] == EOS and not params.ignore_eos)
            full = len(found) + 1 == params.max_tokens or len(ids) == self.limit
            found.append((ids[-1], "stop" if stops else "length" if full else None))
        return found

    @property
    def limit(self) -> int:
        return min(self.config.max_model_len, self.config.max_kv_tokens)


@settings(max_examples=200, deadline=None)
@given(
    config=configs(),
    recompute_at=st.none() | st.integers(2, 30),
    calls=st.lists(calls(), min_size=1, max_size=7),
)
def test_every_request_gets_what_it_would_get_alone(
    config: EngineConfig, recompute_at: int | None, calls: list[Call]
) -> None:
    traffic = Traffic(config, recompute_at, calls)
    traffic.play()
    for name, call in traffic.calls.items():
        needed = len(call.prompt) + max(call.params.max_tokens or 1, call.params.min_tokens)
        assert (name in traffic.refused) == (needed > traffic.limit)
        if name not in traffic.refused:
            check_request(traffic, name, call)
    stats = traffic.engine.stats()
    assert (stats.waiting, stats.running, stats.slots_used, stats.kv_tokens_used) == (0, 0, 0, 0)


def check_request(traffic: Traffic, name: str, call: Call) -> None:
    expected = traffic.expected(call)
    for index in range(call.params.n):
        events = traffic.events.get((name, index), [])
        tokens = [(e.token_id, e.finish_reason) for e in events if e.token_id is not None]
        assert tokens == expected[: len(tokens)]
        assert all(e.error is None for e in events)
        assert all(e.prompt_logprobs is None for e in events[1:])
        if (name, index) not in traffic.stopped:
            reasons = [e.finish_reason for e in events if e.finish_reason]
            assert reasons in (["abort"], [expected[-1][1]])
            assert reasons == ["abort"] or len(tokens) == len(expected)
            assert call.abort_after is not None or reasons != ["abort"]
        if index == 0 and call.params.prompt_logprobs is not None and tokens:
            check_prompt(traffic, call, events[0])


def check_prompt(traffic: Traffic, call: Call, first: TokenEvent) -> None:
    """The most likely token is the one of the reference, which sees the prompt's own regime."""
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(call.prompt)
    model, tokens = traffic.session.model, np.array(call.prompt)
    cache = model.keys_values(tokens, len(tokens))
    for i, entry in enumerate(first.prompt_logprobs[1:]):
        best = int(model.logits(cache, np.array([i]))[0].argmax())
        assert entry is not None
        assert {call.prompt[i + 1], best} == set(entry)
