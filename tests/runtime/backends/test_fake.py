"""The fake session: its model is sensitive to every slip, and it enforces the contract."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import Batch, KVBlock, SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession, open_session
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import StepError
from trtllm_lite.runtime.manifest import (
    GraphSpec,
    KVLayer,
    KVSpec,
    Limits,
    Manifest,
    Phase,
)

VOCAB = 61


def session(recompute_at: int | None = None, *, multi_token: bool = True) -> FakeSession:
    options = SessionOptions(num_slots=4, capacity=24)
    return FakeSession(
        options, vocab_size=VOCAB, recompute_at=recompute_at, multi_token_decode=multi_token
    )


def batch(first_slot: int, rows: list[list[int]], past: list[int], **changes: Any) -> Batch:
    """A prefill batch of right-padded rows that ask for their last token."""
    width = max(len(r) for r in rows)
    lengths = np.array([len(r) for r in rows], np.int32)
    made = Batch(
        phase="prefill",
        first_slot=first_slot,
        token_ids=np.array([r + [0] * (width - len(r)) for r in rows], np.int64),
        past_lens=np.array(past, np.int32),
        query_lens=lengths,
        context_lens=np.array(past, np.int32) + lengths,
        logits_indices=lengths[:, None].astype(np.int64) - 1,
    )
    return replace(made, **changes)


tokens = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=20)


@settings(max_examples=40, deadline=None)
@given(ids=tokens, data=st.data())
def test_chunks_moves_and_blocks_give_the_same_logits_as_nothing_of_it(
    ids: list[int], data: st.DataObject
) -> None:
    fake, slot, done = session(), 0, 0
    while done < len(ids):
        size = data.draw(st.integers(1, len(ids) - done))
        logits = fake.run(batch(slot, [ids[done : done + size]], [done]))
        done += size
        np.testing.assert_array_equal(logits[0, 0], fake.reference(ids[:done]))
        target = data.draw(st.sampled_from([i for i in range(4) if i != slot]))
        relocate(fake, slot, target, done, data.draw(st.sampled_from(["move", "swap", "blocks"])))
        slot = target


def relocate(fake: FakeSession, slot: int, target: int, length: int, how: str) -> None:
    if how == "move":
        fake.move(slot, target, length)
    elif how == "swap":
        fake.swap(slot, target, length)
    else:
        middle = length // 2
        blocks = fake.read(slot, [(0, middle), (middle, length)])
        fake.write(target, 0, blocks)
    fake.release(slot)


def test_ragged_rows_are_each_as_alone() -> None:
    fake = session()
    fake.run(batch(2, [[5, 6]], [0]))
    logits = fake.run(batch(1, [[1, 2, 3, 4], [7, 8]], [0, 2]))
    np.testing.assert_array_equal(logits[0, 0], fake.reference([1, 2, 3, 4]))
    np.testing.assert_array_equal(logits[1, 0], fake.reference([5, 6, 7, 8]))


def test_logits_of_every_position() -> None:
    fake, ids = session(), [3, 1, 4, 1]
    logits = fake.run(batch(0, [ids], [0], logits_indices=np.array([[0, 1, 2, 3]])))
    for i in range(4):
        np.testing.assert_array_equal(logits[0, i], fake.reference(ids[: i + 1]))


@settings(max_examples=60, deadline=None)
@given(ids=tokens, data=st.data())
def test_logits_depend_on_every_cached_token_and_its_place(
    ids: list[int], data: st.DataObject
) -> None:
    fake, other = session(), list(ids)
    place = data.draw(st.integers(0, len(ids) - 1))
    other[place] = (ids[place] + data.draw(st.integers(1, VOCAB - 1))) % VOCAB
    assert (fake.reference(ids) != fake.reference(other)).any()
    assert (fake.reference(ids) != fake.reference([0, *ids])).any()
    if ids[0] != ids[-1]:
        swapped = [ids[-1], *ids[1:-1], ids[0]]
        assert (fake.reference(ids) != fake.reference(swapped)).any()


def test_regimes_follow_the_context_length_and_do_not_mix() -> None:
    fake, ids = session(recompute_at=3), [1, 2, 3, 4]
    long = fake.run(batch(0, [ids], [0]))[0, 0].copy()
    np.testing.assert_array_equal(long, fake.reference(ids))
    fake.run(batch(1, [ids[:3]], [0]))
    stale = fake.run(batch(1, [ids[3:]], [3]))[0, 0].copy()
    assert (stale != long).any()
    assert (session().reference(ids) != long).any()
    np.testing.assert_array_equal(session().reference(ids[:3]), fake.reference(ids[:3]))


def test_logits_are_gone_after_the_next_run() -> None:
    fake = session()
    first = fake.run(batch(0, [[1]], [0]))
    fake.run(batch(1, [[1]], [0]))
    assert np.isnan(first).all()


def test_unwritten_released_and_trailing_memory_is_poison() -> None:
    fake = session()
    with pytest.raises(StepError, match="slot 0 does not hold all of the tokens 0 to 2"):
        fake.run(batch(0, [[1]], [2]))
    fake.run(batch(0, [[1, 2, 3]], [0]))
    fake.release(0)
    with pytest.raises(StepError, match="does not hold"):
        fake.read(0, [(0, 1)])
    fake.run(batch(0, [[1, 2, 3]], [0]))
    fake.run(batch(0, [[1]], [0]))
    with pytest.raises(StepError, match="does not hold"):
        fake.move(0, 1, 2)


def test_padding_is_not_written() -> None:
    fake = session()
    fake.run(batch(0, [[1, 2], [3]], [0, 0]))
    with pytest.raises(StepError, match="does not hold"):
        fake.read(1, [(0, 2)])


def test_blocks_are_copies() -> None:
    fake = session()
    fake.run(batch(0, [[1, 2]], [0]))
    (block,) = fake.read(0, [(0, 2)])
    kept = block.keys[0].copy()
    fake.release(0)
    np.testing.assert_array_equal(block.keys[0], kept)
    assert block.num_tokens == 2
    assert block.nbytes == 2 * fake.info.kv_bytes_per_token


def test_keys_values_layers_and_heads_cannot_be_confused() -> None:
    fake = session()
    fake.run(batch(0, [[1, 2]], [0]))
    (good,) = fake.read(0, [(0, 2)])
    heads = tuple(k[::-1].copy() for k in good.keys)
    for wrong in (
        KVBlock(good.values, good.keys),
        KVBlock(good.keys[::-1], good.values[::-1]),
        KVBlock(heads, good.values),
    ):
        fake.write(0, 0, [wrong])
        logits = fake.run(batch(0, [[3]], [2]))[0, 0]
        assert (logits != fake.reference([1, 2, 3])).any()


BROKEN: dict[str, dict[str, Any]] = {
    "token_ids dtype": {"token_ids": np.array([[1, 2]], np.int32)},
    "past_lens dtype": {"past_lens": np.array([0], np.int64)},
    "query_lens shape": {"query_lens": np.array([2, 2], np.int32)},
    "context_lens shape": {"context_lens": np.array([[2]], np.int32)},
    "logits_indices$": {"logits_indices": np.array([[2]])},
    "token_ids$": {"token_ids": np.array([[1, VOCAB]])},
    "first_slot": {"first_slot": 4},
    "past_lens$": {"past_lens": np.array([23], np.int32)},
    "query_lens$": {"query_lens": np.array([0], np.int32)},
    "context_lens$": {"context_lens": np.array([1], np.int32)},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_batch_that_breaks_the_contract_is_refused(what: str) -> None:
    with pytest.raises(StepError, match=f"breaks the contract: {what}"):
        session().run(replace(batch(0, [[1, 2]], [0]), **BROKEN[what]))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_position_of_a_ragged_batch_has_its_own_logits(phase: Phase) -> None:
    fake = session()
    rows = [[1, 2, 3], [4], [5, 6]]
    indices = np.array([[0, 1, 2], [0, 0, 0], [0, 1, 1]])
    logits = fake.run(batch(0, rows, [0, 0, 0], phase=phase, logits_indices=indices))
    for i, row in enumerate(rows):
        for j, position in enumerate(indices[i]):
            np.testing.assert_array_equal(logits[i, j], fake.reference(row[: position + 1]))


def test_decode_is_one_token_a_row_where_the_graph_takes_no_more() -> None:
    fake = session(multi_token=False)
    assert not fake.info.multi_token_decode
    fake.run(batch(0, [[1, 2], [3, 4]], [0, 0]))
    fake.run(batch(0, [[3], [5]], [2, 2], phase="decode"))
    for rows, more in (([[1, 2]], {}), ([[1]], {"logits_indices": np.array([[0, 0]])})):
        with pytest.raises(StepError, match="breaks the contract: decode"):
            fake.run(batch(0, rows, [0], phase="decode", **more))


def test_the_last_slot_and_the_last_token_of_capacity_can_be_used() -> None:
    fake, ids = session(), list(range(24))
    logits = fake.run(batch(3, [ids], [0]))
    np.testing.assert_array_equal(logits[0, 0], fake.reference(ids))
    with pytest.raises(StepError, match="cannot hold 25"):
        fake.write(0, 1, fake.read(3, [(0, 24)]))


def test_a_fault_is_raised_the_given_number_of_times_and_touches_nothing() -> None:
    fake = session()
    fake.run(batch(0, [[1]], [0]))
    fake.fail_next(2, StepError("out of luck"))
    for _ in range(2):
        with pytest.raises(StepError, match="out of luck"):
            fake.run(batch(0, [[2]], [1]))
    logits = fake.run(batch(0, [[2]], [1]))
    np.testing.assert_array_equal(logits[0, 0], fake.reference([1, 2]))


def test_a_closed_session_refuses_everything_but_closing() -> None:
    fake = session()
    fake.close()
    fake.close()
    with pytest.raises(StepError, match="closed"):
        fake.run(batch(0, [[1]], [0]))
    with pytest.raises(StepError, match="closed"):
        fake.release(0)


def test_a_session_takes_vocabulary_regimes_and_decode_form_from_a_bundle(
    fake_bundle: Bundle,
) -> None:
    fake = open_session(fake_bundle, SessionOptions(1, 8))
    assert fake.reference([1, 2]).shape == (fake_bundle.manifest.model.vocab_size,)
    assert not fake.info.multi_token_decode
    plain = FakeSession(SessionOptions(1, 8), vocab_size=fake_bundle.manifest.model.vocab_size)
    assert (fake.reference([1, 2, 3]) != plain.reference([1, 2, 3])).any()


@pytest.fixture
def fake_bundle(make_manifest: Callable[..., Manifest]) -> Bundle:
    kv = KVSpec("float32", (KVLayer(1, 8),), recompute_at=2)
    graphs = [GraphSpec("decode", "decode.onnx", (), ())]
    sizes = {"hidden_size": 8, "vocab_size": 17}
    return Bundle(Path(), make_manifest("cpu", graphs, kv, Limits(1, 8), **sizes))
