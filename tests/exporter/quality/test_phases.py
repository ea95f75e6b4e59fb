"""Both graphs are measured at the right positions, whatever the number of windows and slots.

The fake session's logits depend on everything that a row has cached, so a row out of place, a slot
mixed up or a position off by one cannot agree with its `reference`.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.exporter.quality.measure import compare, total
from trtllm_lite.exporter.quality.phases import (
    ROWS,
    decode_logits,
    measure_long,
    measure_phases,
    prefill_logits,
)
from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.progress import NoProgress

VOCAB = 23


def session(slots: int = ROWS) -> FakeSession:
    return FakeSession(SessionOptions(num_slots=slots, capacity=64), vocab_size=VOCAB)


class FakeReference:
    """The fake model computed from nothing but the ids, plus noise."""

    def __init__(self, made: FakeSession, noise: float = 0.0) -> None:
        self._made, self._noise = made, noise

    def logits(self, token_ids: list[int], last: int) -> Any:
        ends = range(len(token_ids) - last + 1, len(token_ids) + 1)
        exact = np.stack([self._made.reference(token_ids[:end]) for end in ends])
        wave = np.sin(np.arange(exact.size).reshape(exact.shape))
        return (exact + self._noise * wave).astype(np.float32)


def text(count: int, length: int) -> Any:
    return np.random.default_rng(count * 100 + length).integers(0, VOCAB, (count, length))


@given(st.integers(1, 2 * ROWS + 1), st.integers(3, 12))
def test_a_faithful_session_is_perfect(count: int, length: int) -> None:
    made = session()
    got = measure_phases(made, FakeReference(made), text(count, length), VOCAB, NoProgress())
    for quality in (got.prefill, got.decode):
        assert (quality.kl, quality.top1, quality.ppl_ratio) == (0.0, 1.0, 1.0)
    assert got.prefill.num_tokens == got.decode.num_tokens == count * (length - 1)


def test_what_is_measured_is_the_distance_to_the_reference() -> None:
    windows = text(ROWS + 1, 9)
    made = session()
    noisy, exact = FakeReference(made, 0.5), FakeReference(made)
    got = measure_phases(made, noisy, windows, VOCAB, NoProgress())
    parts = [(noisy.logits(list(w), 9)[:-1], exact.logits(list(w), 9)[:-1], w[1:]) for w in windows]
    want = total(compare(*part) for part in parts)
    assert dataclasses.astuple(got.prefill) == pytest.approx(dataclasses.astuple(want))
    assert dataclasses.astuple(got.decode) == pytest.approx(dataclasses.astuple(want))
    assert got.decode.kl > 0


@given(st.integers(3, 20), st.data())
def test_the_end_of_a_long_window_is_measured_where_it_lies(
    length: int, data: st.DataObject
) -> None:
    last = data.draw(st.integers(1, length - 1))
    made, window = session(1), text(1, length)[0]
    got = measure_long(made, FakeReference(made, 0.5), window, last)
    ids = [int(t) for t in window]
    noisy = FakeReference(made, 0.5).logits(ids, last + 1)[:-1]
    exact = FakeReference(made).logits(ids, last + 1)[:-1]
    want = total([compare(noisy, exact, window[-last:])])
    assert dataclasses.astuple(got) == pytest.approx(dataclasses.astuple(want))
    assert got.num_tokens == last


class Recorder:
    """A session that notes which phase computed which number of tokens."""

    def __init__(self, inner: FakeSession) -> None:
        self._inner = inner
        self.seen: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, batch: Batch) -> Any:
        self.seen.append((batch.phase, batch.rows, batch.token_ids.shape[1]))
        return self._inner.run(batch)


def test_each_phase_uses_its_own_graph() -> None:
    made = Recorder(session())
    prefill_logits(made, text(1, 9)[0])
    assert made.seen == [("prefill", 1, 9)]
    made.seen.clear()
    positions = [position for position, _ in decode_logits(made, text(3, 9))]
    assert positions == list(range(8))
    assert made.seen == [("decode", 3, 1)] * 8


@pytest.mark.parametrize(("vocab", "rows"), [(VOCAB, ROWS), (2**27, 1)])
def test_a_large_vocabulary_is_held_for_fewer_windows(vocab: int, rows: int) -> None:
    made = Recorder(session())
    measure_phases(made, FakeReference(session()), text(ROWS, 5), vocab, NoProgress())
    assert max(count for phase, count, _ in made.seen if phase == "decode") == rows
