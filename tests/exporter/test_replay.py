"""Driving a session directly gives, for every row, what the row gives alone.

The fake session's logits depend on everything that a row has cached, and reading a token that was
not written is an error in it, so equality with its `reference` proves the books.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.exporter.replay import decode, greedy, prefill
from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession

VOCAB = 61
PROMPTS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1)


def session(slots: int = 4, recompute_at: int | None = None) -> FakeSession:
    options = SessionOptions(num_slots=slots, capacity=128)
    return FakeSession(options, vocab_size=VOCAB, recompute_at=recompute_at)


def slow_greedy(made: FakeSession, prompt: Sequence[int], count: int) -> tuple[list[int], Any]:
    """Greedy from nothing but the reference of all tokens so far."""
    ids, logits = list(prompt), []
    for _ in range(count):
        logits.append(made.reference(ids))
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], np.stack(logits)


@given(PROMPTS.map(lambda p: p[:4]), st.one_of(st.none(), st.integers(1, 25)))
def test_prefill_of_ragged_rows(prompts: list[list[int]], chunk: int | None) -> None:
    made = session()
    got = prefill(made, prompts, chunk)
    assert np.array_equal(got, np.stack([made.reference(p) for p in prompts]))


@given(PROMPTS.map(lambda p: p[:4]), st.integers(1, 12))
def test_greedy_of_ragged_rows(prompts: list[list[int]], count: int) -> None:
    made = session()
    tokens, logits = greedy(made, prompts, count)
    assert logits.shape == (count, len(prompts), VOCAB)
    for row, prompt in enumerate(prompts):
        want_tokens, want_logits = slow_greedy(made, prompt, count)
        assert tokens[row] == want_tokens
        assert np.array_equal(logits[:, row], want_logits)


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=3)
)
def test_greedy_computes_again_where_a_row_crosses(prompts: list[list[int]]) -> None:
    """Rows cross the limit at different steps, or begin beyond it."""
    made = session(recompute_at=6)
    tokens, logits = greedy(made, prompts, 10, recompute_at=6)
    for row, prompt in enumerate(prompts):
        want_tokens, want_logits = slow_greedy(made, prompt, 10)
        assert tokens[row] == want_tokens
        assert np.array_equal(logits[:, row], want_logits)


def test_not_computing_again_gives_other_logits() -> None:
    """The check above can fail: the fake's regimes differ."""
    made = session(recompute_at=6)
    _, logits = greedy(made, [[1, 2, 3, 4]], 10, recompute_at=None)
    assert not np.array_equal(logits[:, 0], slow_greedy(made, [1, 2, 3, 4], 10)[1])


@given(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=20), st.data())
def test_decode_after_prefill(ids: list[int], data: st.DataObject) -> None:
    head = data.draw(st.integers(1, len(ids) - 1))
    made = session()
    prefill(made, [ids[:head]])
    for length in range(head, len(ids)):
        got = decode(made, [ids[length]], [length])
    assert np.array_equal(got, [made.reference(ids)])


def test_decode_of_rows_at_different_lengths() -> None:
    made = session()
    prefill(made, [[1, 2, 3], [4]])
    got = decode(made, [7, 8], [3, 1])
    assert np.array_equal(got, [made.reference([1, 2, 3, 7]), made.reference([4, 8])])


class Recorder(FakeSession):
    """Keeps the batches it ran."""

    def __init__(self) -> None:
        super().__init__(SessionOptions(num_slots=4, capacity=128), vocab_size=VOCAB)
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> Any:
        self.batches.append(batch)
        return super().run(batch)


@pytest.mark.parametrize(("chunk", "widths"), [(None, [9]), (4, [4, 4, 1]), (9, [9]), (20, [9])])
def test_chunks(chunk: int | None, widths: list[int]) -> None:
    made = Recorder()
    prefill(made, [list(range(9)), [1, 2]], chunk)
    assert [b.token_ids.shape[1] for b in made.batches] == widths
    assert {b.phase for b in made.batches} == {"prefill"}
    assert [b.past_lens[0] for b in made.batches] == np.cumsum([0, *widths[:-1]]).tolist()
    assert all(b.context_lens.tolist() == [9, 2] for b in made.batches)


def test_results_are_copies() -> None:
    """A session's logits are gone at its next run."""
    made = session()
    first = prefill(made, [[1, 2]])
    kept = first.copy()
    decode(made, [3], [2])
    assert np.array_equal(first, kept)
    second = decode(made, [4], [3])
    kept = second.copy()
    decode(made, [5], [4])
    assert np.array_equal(second, kept)
