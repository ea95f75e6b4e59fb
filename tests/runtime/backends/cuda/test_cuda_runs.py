"""How a batch becomes runs that a graph of target "cuda" can do."""

from collections.abc import Callable

import numpy as np

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.backends.batch_pieces import with_spare_rows
from trtllm_lite.runtime.backends.cuda_runs import max_total_len, runs

MakeBatch = Callable[..., Batch]


def test_rows_that_begin_run_together(make_batch: MakeBatch) -> None:
    batch = make_batch("prefill", [[1, 2, 3], [4]], [0, 0])
    (run,) = runs(batch)
    assert run.batch is batch
    assert (run.row, max_total_len(run.batch, 100)) == (0, 3)


def test_a_decode_run_has_the_same_longest_length_whatever_it_holds(make_batch: MakeBatch) -> None:
    for past in ([0, 0], [3, 90]):
        (run,) = runs(make_batch("decode", [[1], [2]], past))
        assert max_total_len(run.batch, 100) == 100


def test_rows_that_continue_run_alone(make_batch: MakeBatch) -> None:
    batch = make_batch("prefill", [[1, 2, 3], [4], [5, 6]], [0, 7, 2], 4)
    made = list(runs(batch))
    assert [run.row for run in made] == [0, 1, 2]
    assert [max_total_len(run.batch, 100) for run in made] == [3, 8, 4]
    assert [run.batch.first_slot for run in made] == [4, 5, 6]
    assert [run.batch.token_ids.tolist() for run in made] == [[[1, 2, 3]], [[4]], [[5, 6]]]
    for run in made:
        assert run.batch.past_lens.tolist() == [batch.past_lens[run.row]]
        assert run.batch.context_lens.tolist() == [batch.context_lens[run.row]]
        assert run.batch.logits_indices.tolist() == [batch.logits_indices[run.row].tolist()]
        # Without padding: the attention would take it for tokens.
        assert run.batch.query_lens.tolist() == [run.batch.token_ids.shape[1]]


def test_spare_rows_hold_one_token_of_an_empty_cache(make_batch: MakeBatch) -> None:
    batch = make_batch("decode", [[5], [6]], [3, 4])
    assert with_spare_rows(batch, 2) is batch
    filled = with_spare_rows(batch, 4)
    assert filled.token_ids.tolist() == [[5], [6], [0], [0]]
    assert filled.past_lens.tolist() == [3, 4, 0, 0]
    assert filled.query_lens.tolist() == [1, 1, 1, 1]
    assert filled.logits_indices.dtype == np.int64
