"""Parts of a batch, and batches filled up: what every backend does that runs one in pieces."""

from dataclasses import dataclass, replace

import numpy as np

from trtllm_lite.runtime.backends.base import Array, Batch


@dataclass(frozen=True, eq=False)
class Piece:
    """One run. Its logits [rows, k] are those of the rows from `row` on of the whole batch. Where a
    row is run in parts, `columns` says which of the row's logits they are: `picks` of the run's."""

    batch: Batch
    row: int
    columns: tuple[int, ...] | None = None
    picks: tuple[int, ...] = ()


def some_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Without the padding that only other rows needed."""
    query = batch.query_lens[start:stop]
    return replace(
        batch,
        first_slot=batch.first_slot + start,
        token_ids=batch.token_ids[start:stop, : int(query.max())],
        past_lens=batch.past_lens[start:stop],
        query_lens=query,
        context_lens=batch.context_lens[start:stop],
        logits_indices=batch.logits_indices[start:stop],
    )


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
