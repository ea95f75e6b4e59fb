"""Arrays built from plans: every number against the rows, and how rows are grouped."""

from collections.abc import Sequence as Ordered
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.batch import build_batches
from trtllm_lite.runtime.plan import PlanRow, StepPlan
from trtllm_lite.runtime.request import Request, Sequence
from trtllm_lite.runtime.sampling_params import SamplingParams


def row(slot: int, start: int, num: int, length: int, *, all_logits: bool = False) -> PlanRow:
    tokens = [100 * slot + i for i in range(length)]
    request = Request(str(slot), tuple(tokens), SamplingParams())
    return PlanRow(Sequence(request, 0, tokens, 999), slot, start, num, length, all_logits)


def prefill(*rows: PlanRow) -> list[Batch]:
    return build_batches(StepPlan((), (), rows))


def slots(batches: list[Batch]) -> list[tuple[int, int]]:
    return [(b.first_slot, b.rows) for b in batches]


def test_an_empty_plan_has_no_batch() -> None:
    assert build_batches(StepPlan((), (), ())) == []


def test_decode_rows_are_one_batch_over_the_first_slots() -> None:
    plan = StepPlan((), (row(0, 4, 1, 5), row(1, 8, 1, 9)), (row(2, 0, 3, 3),))
    decode, rest = build_batches(plan)
    assert (decode.phase, decode.first_slot) == ("decode", 0)
    assert decode.token_ids.tolist() == [[4], [108]]
    assert decode.past_lens.tolist() == [4, 8]
    assert decode.query_lens.tolist() == [1, 1]
    assert decode.context_lens.tolist() == [5, 9]
    assert decode.logits_indices.tolist() == [[0], [0]]
    assert rest.phase == "prefill"


def test_decode_rows_with_drafts_ask_for_every_position() -> None:
    drafted = replace(row(0, 4, 1, 5), num_tokens=3, context_len=7, draft=(8, 9))
    (batch,) = build_batches(StepPlan((), (drafted, row(1, 8, 1, 9)), ()))
    assert batch.token_ids.tolist() == [[4, 8, 9], [108, 0, 0]]
    assert batch.past_lens.tolist() == [4, 8]
    assert batch.query_lens.tolist() == [3, 1]
    assert batch.context_lens.tolist() == [7, 9]
    assert batch.logits_indices.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_prefill_rows_are_padded_right_and_ask_for_their_last_token() -> None:
    (batch,) = prefill(row(1, 2, 4, 9), row(2, 0, 3, 3))
    assert batch.token_ids.tolist() == [[102, 103, 104, 105], [200, 201, 202, 0]]
    assert batch.past_lens.tolist() == [2, 0]
    assert batch.query_lens.tolist() == [4, 3]
    assert batch.context_lens.tolist() == [9, 3]
    assert batch.logits_indices.tolist() == [[3], [2]]


def test_a_row_that_wants_all_logits_runs_alone() -> None:
    batches = prefill(row(0, 0, 4, 4), row(1, 0, 4, 9, all_logits=True), row(2, 0, 4, 4))
    assert slots(batches) == [(0, 1), (1, 1), (2, 1)]
    assert batches[1].logits_indices.tolist() == [[0, 1, 2, 3]]


def test_only_neighbouring_slots_share_a_batch_whatever_the_order_of_the_rows() -> None:
    batches = prefill(row(4, 0, 5, 5), row(1, 0, 5, 5), row(2, 0, 5, 5))
    assert slots(batches) == [(1, 2), (4, 1)]


def test_a_quarter_of_padding_is_allowed_and_not_more() -> None:
    assert slots(prefill(row(0, 0, 8, 8), row(1, 0, 4, 4))) == [(0, 2)]
    assert slots(prefill(row(0, 0, 8, 8), row(1, 0, 3, 3))) == [(0, 1), (1, 1)]


chunks = st.lists(
    st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 12), st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(chunks=chunks)
def test_every_row_is_run_once_in_its_slot(
    chunks: list[tuple[bool, int, int, bool]],
) -> None:
    rows = [
        row(slot, start, num, start + num + 1, all_logits=wants)
        for slot, (present, start, num, wants) in enumerate(chunks)
        if present
    ]
    plan = StepPlan((), (), tuple(reversed(rows)))
    seen: list[PlanRow] = []
    for batch in build_batches(plan):
        seen += plan.rows_of(batch)
        check_batch_against_rows(batch, plan.rows_of(batch))
    assert sorted(seen, key=lambda r: r.slot) == rows


def check_batch_against_rows(batch: Batch, rows: Ordered[PlanRow]) -> None:
    lengths = [r.num_tokens for r in rows]
    assert [r.slot for r in rows] == list(range(batch.first_slot, batch.first_slot + len(rows)))
    assert batch.token_ids.shape == (len(rows), max(lengths))
    assert 1 - sum(lengths) / batch.token_ids.size <= 0.25
    assert len(rows) == 1 or not any(r.all_logits for r in rows)
    for i, r in enumerate(rows):
        padded = r.sequence.token_ids[r.start : r.start + r.num_tokens]
        padded += [0] * (max(lengths) - r.num_tokens)
        assert batch.token_ids[i].tolist() == padded
        assert batch.past_lens[i] == r.start
        assert batch.query_lens[i] == r.num_tokens
        assert batch.context_lens[i] == r.context_len
        wanted = list(range(r.num_tokens)) if r.all_logits else [r.num_tokens - 1]
        assert batch.logits_indices[i].tolist() == wanted
    for wide in (batch.token_ids, batch.logits_indices):
        assert wide.dtype == np.int64
    for narrow in (batch.past_lens, batch.query_lens, batch.context_lens):
        assert narrow.dtype == np.int32


def test_tokens_that_were_decoded_before_are_decoded_again() -> None:
    """In runs of their own, which ask for the last logits only."""
    again = [replace(row(slot, 4, 3, 9), decoded=True) for slot in (2, 3)]
    plan = StepPlan((), (row(0, 7, 1, 8),), (row(1, 0, 3, 9), *again, row(4, 0, 3, 9)))
    batches = build_batches(plan)
    assert [(b.phase, b.first_slot, b.rows) for b in batches] == [
        ("decode", 0, 1),
        ("prefill", 1, 1),
        ("decode", 2, 2),
        ("prefill", 4, 1),
    ]
    assert [plan.rows_of(b) for b in batches] == [
        plan.decode,
        [plan.prefill[0]],
        again,
        [plan.prefill[3]],
    ]
    assert batches[2].logits_indices.shape == (2, 1)
