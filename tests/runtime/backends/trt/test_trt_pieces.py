"""A batch cut into runs that the profiles allow: every token runs once, every logit is found."""

import random
from dataclasses import replace

import numpy as np
import pytest

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.backends.trt_pieces import Bounds, RunLimits, filled_up, pieces
from trtllm_lite.runtime.errors import StepError
from trtllm_lite.runtime.manifest import Phase

WIDE = RunLimits(Bounds(1, 64), Bounds(1, 64), Bounds(1, 64))
ONE = RunLimits(Bounds(1, 64), Bounds(1, 1), Bounds(1, 1))


def limits(rows: int, seq: int, wanted: int) -> dict[Phase, RunLimits]:
    many = RunLimits(Bounds(1, rows), Bounds(1, seq), Bounds(1, wanted))
    one = RunLimits(Bounds(1, rows), Bounds(1, 1), Bounds(1, 1))
    return {"prefill": many, "decode": one, "extend": many}


def batch(rows: list[tuple[int, int]], wanted: int = 1) -> Batch:
    """Rows of (tokens in the cache, new tokens). Token ids are positions."""
    width = max(new for _, new in rows)
    past, query = (np.array(x, np.int32) for x in zip(*rows, strict=True))
    steps = np.minimum(np.arange(width), query[:, None] - 1)
    picks = query[:, None] - 1 - np.minimum(np.arange(wanted)[::-1], query[:, None] - 1)
    return Batch("prefill", 3, past[:, None] + steps, past, query, past + query, picks.astype(int))


def test_what_fits_is_one_run_on_the_plan_that_it_needs() -> None:
    plans: dict[Phase, RunLimits] = {"prefill": WIDE, "decode": ONE, "extend": WIDE}
    cases: list[tuple[list[tuple[int, int]], Phase]] = [
        ([(0, 5), (0, 9)], "prefill"),
        ([(0, 1)], "prefill"),
        ([(4, 1), (9, 1)], "decode"),
        ([(0, 3), (2, 1)], "extend"),
        ([(7, 2)], "extend"),
    ]
    for rows, phase in cases:
        (piece,) = pieces(batch(rows), plans)
        assert (piece.batch.phase, piece.row, piece.columns) == (phase, 0, None)
        assert np.array_equal(piece.batch.token_ids, batch(rows).token_ids)


def test_a_plan_that_was_not_opened_is_missed() -> None:
    with pytest.raises(StepError, match="without the prefill graph"):
        pieces(batch([(0, 3)]), {"decode": ONE})


@pytest.mark.parametrize("seed", range(60))
def test_pieces_make_the_whole(seed: int) -> None:
    """Every token runs once and in order, after those before it; every logit is of its position."""
    rng = random.Random(seed)
    rows = [(rng.choice([0, 0, rng.randint(1, 9)]), rng.randint(1, 14)) for _ in range(4)]
    whole = batch(rows[: rng.randint(1, 4)], rng.choice([1, 3, 14]))
    plans = limits(rng.randint(1, 4), rng.randint(1, 9), rng.randint(1, 5))
    cached = [list(range(past)) for past in whole.past_lens]
    found = np.full(whole.logits_indices.shape, -1)
    for piece in pieces(whole, plans):
        part, limit = piece.batch, plans[piece.batch.phase]
        assert part.rows <= limit.rows.most
        assert part.token_ids.shape[1] <= limit.seq.most
        assert part.logits_indices.shape[1] <= limit.num_logits.most
        assert part.phase != "prefill" or not part.past_lens.any()
        assert part.first_slot == whole.first_slot + piece.row
        for i in range(part.rows):
            row, query = cached[piece.row + i], int(part.query_lens[i])
            assert len(row) == part.past_lens[i]
            row += part.token_ids[i, :query].tolist()
            positions = part.past_lens[i] + part.logits_indices[i]
            if piece.columns is None:
                found[piece.row + i] = positions
            else:
                found[piece.row, list(piece.columns)] = positions[list(piece.picks)]
    assert [len(row) for row in cached] == (whole.past_lens + whole.query_lens).tolist()
    assert all(row == list(range(len(row))) for row in cached)
    assert np.array_equal(found, whole.past_lens[:, None] + whole.logits_indices)


def test_padding_is_added_where_the_plan_demands_it() -> None:
    least = RunLimits(Bounds(2, 4), Bounds(4, 8), Bounds(3, 8))
    filled = filled_up(batch([(0, 2), (5, 1)]), least, capacity=9)
    assert filled.token_ids.tolist() == [[0, 1, 0, 0], [5, 5, 0, 0]]
    assert filled.logits_indices.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert filled.query_lens.tolist() == [2, 1]
    with pytest.raises(StepError, match=r"5 cached and 4 new tokens, padding included.*the 8"):
        filled_up(batch([(0, 2), (5, 1)]), least, capacity=8)
    with pytest.raises(StepError, match="at least 2 rows; the batch has 1"):
        filled_up(batch([(0, 2)]), least, capacity=9)
    same = batch([(3, 1), (3, 1)])
    assert filled_up(same, replace(WIDE), capacity=4) is same
