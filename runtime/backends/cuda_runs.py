"""A batch as the runs that a graph of target "cuda" can do.

Its attention knows no padding behind tokens that continue from a cache (`runtime/manifest.py`, the
contract of that target), so such rows run one by one, each without padding. Rows that all begin run
together, and so does one token a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trtllm_lite.runtime.backends.base import Array, Batch


@dataclass(frozen=True, eq=False)
class Run:
    """One run: the rows from `row` on of the whole batch, and the `max_total_len` it takes."""

    batch: Batch
    row: int
    max_total_len: int


def runs(batch: Batch, longest: int) -> Iterator[Run]:
    """In the order of the rows. longest: of any sequence.

    A decode run gets `longest` whatever its rows hold, which the attention allows where there is
    one token a row: a value that is read in host memory is part of what a CUDA graph captures.
    """
    seq = batch.token_ids.shape[1]
    if batch.phase == "decode":
        yield Run(batch, 0, longest)
    elif not batch.past_lens.any():
        yield Run(batch, 0, seq)
    else:
        for row in range(batch.rows):
            yield _alone(batch, row)


def _alone(batch: Batch, row: int) -> Run:
    """One row without its padding."""
    count, rows = int(batch.query_lens[row]), slice(row, row + 1)
    alone = Batch(
        phase=batch.phase,
        first_slot=batch.first_slot + row,
        token_ids=batch.token_ids[rows, :count],
        past_lens=batch.past_lens[rows],
        query_lens=batch.query_lens[rows],
        context_lens=batch.context_lens[rows],
        logits_indices=batch.logits_indices[rows],
    )
    return Run(alone, row, int(batch.past_lens[row]) + count)


def with_spare_rows(batch: Batch, rows: int) -> Batch:
    """The batch filled up to `rows` with rows of one token in an empty cache."""
    missing = rows - batch.rows
    if not missing:
        return batch

    def filled(array: Array, value: int) -> Array:
        pads = ((0, missing), *((0, 0) for _ in array.shape[1:]))
        return np.pad(array, pads, constant_values=value)

    return replace(
        batch,
        token_ids=filled(batch.token_ids, 0),
        past_lens=filled(batch.past_lens, 0),
        query_lens=filled(batch.query_lens, 1),
        context_lens=filled(batch.context_lens, 1),
        logits_indices=filled(batch.logits_indices, 0),
    )
