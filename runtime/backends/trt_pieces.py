"""Which plans run a batch, and in how many runs: a plan takes no more than its profile allows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.backends.batch_pieces import Piece, some_rows
from trtllm_lite.runtime.backends.phases import graph_for
from trtllm_lite.runtime.errors import StepError
from trtllm_lite.runtime.manifest import Phase


@dataclass(frozen=True)
class Bounds:
    """The least and the most of something that a plan runs."""

    least: int
    most: int


@dataclass(frozen=True)
class RunLimits:
    """What one run of a plan may hold: rows, tokens a row, logits a row."""

    rows: Bounds
    seq: Bounds
    num_logits: Bounds


def pieces(batch: Batch, limits: Mapping[Phase, RunLimits]) -> list[Piece]:
    """The runs that make a batch, in order; usually one. Raises StepError without a plan for it."""
    return list(_rows(batch, 0, limits))


def filled_up(batch: Batch, limits: RunLimits, capacity: int) -> Batch:
    """The batch with as much padding behind its tokens as the plan demands. Padding is written to
    the cache like tokens. Raises StepError where that would be beyond `capacity`."""
    rows, seq = batch.token_ids.shape
    missing = max(0, limits.seq.least - seq)
    if int(batch.past_lens.max()) + seq + missing > capacity:
        raise StepError(
            f"a row of {int(batch.past_lens.max())} cached and {seq + missing} new tokens, padding "
            f"included, does not fit the {capacity} tokens of a slot"
        )
    if rows < limits.rows.least:
        raise StepError(f"the plan runs at least {limits.rows.least} rows; the batch has {rows}")
    if missing:
        batch = replace(batch, token_ids=np.pad(batch.token_ids, ((0, 0), (0, missing))))
    missing = limits.num_logits.least - batch.logits_indices.shape[1]
    if missing > 0:
        padded = np.pad(batch.logits_indices, ((0, 0), (0, missing)), mode="edge")
        batch = replace(batch, logits_indices=padded)
    return batch


def _rows(batch: Batch, row: int, limits: Mapping[Phase, RunLimits]) -> Iterator[Piece]:
    phase = graph_for(batch, limits)
    limit = _limit(limits, phase)
    if batch.rows > limit.rows.most:
        step = limit.rows.most
    elif _fits(batch, limit):
        yield Piece(replace(batch, phase=phase), row)
        return
    elif batch.rows > 1:
        step = 1
    else:
        yield from _tokens(batch, row, limits)
        return
    for start in range(0, batch.rows, step):
        yield from _rows(some_rows(batch, start, start + step), row + start, limits)


def _fits(batch: Batch, limit: RunLimits) -> bool:
    seq, wanted = int(batch.token_ids.shape[1]), int(batch.logits_indices.shape[1])
    return seq <= limit.seq.most and wanted <= limit.num_logits.most


def _tokens(batch: Batch, row: int, limits: Mapping[Phase, RunLimits]) -> Iterator[Piece]:
    """The tokens of one row, as many at a time as the plans take."""
    indices = batch.logits_indices[0].tolist()
    start, total = 0, int(batch.query_lens[0])
    while start < total:
        limit = _limit(limits, graph_for(_part(batch, start, total, indices), limits))
        stop = min(total, start + limit.seq.most)
        wanted = sorted({i for i in indices if start <= i < stop})
        if len(wanted) > limit.num_logits.most:
            stop = wanted[limit.num_logits.most]
            wanted = wanted[: limit.num_logits.most]
        columns = tuple(j for j, i in enumerate(indices) if start <= i < stop)
        picks = tuple(wanted.index(indices[j]) for j in columns)
        part = _part(batch, start, stop, wanted or [stop - 1])
        yield Piece(replace(part, phase=graph_for(part, limits)), row, columns, picks)
        start = stop


def _part(batch: Batch, start: int, stop: int, wanted: list[int]) -> Batch:
    """The tokens start .. stop - 1 of a row, whose logits at the positions `wanted` are wanted."""
    return replace(
        batch,
        token_ids=batch.token_ids[:, start:stop],
        past_lens=batch.past_lens + np.int32(start),
        query_lens=np.array([stop - start], np.int32),
        logits_indices=np.array([wanted], np.int64) - start,
    )


def _limit(limits: Mapping[Phase, RunLimits], phase: Phase) -> RunLimits:
    if phase not in limits:
        raise StepError(f"the session was opened without the {phase} graph")
    return limits[phase]
