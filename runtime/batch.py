"""From a plan to the arrays that a session runs."""

from collections.abc import Iterator, Sequence

import numpy as np

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.plan import PlanRow, StepPlan

MAX_PADDING = 0.25
_I32, _I64 = np.dtype(np.int32), np.dtype(np.int64)


def build_batches(plan: StepPlan) -> list[Batch]:
    """One decode batch, then prefill batches of neighbouring slots with like chunk lengths. Tokens
    that were decoded before have batches of their own, on the decode graph."""
    batches = [_batch("decode", plan.decode, every=True)] if plan.decode else []
    if plan.prefill:
        batches += [
            _batch("decode" if rows[0].decoded else "prefill", rows, every=rows[0].all_logits)
            for rows in _groups(plan.prefill)
        ]
    return batches


def _groups(rows: Sequence[PlanRow]) -> Iterator[list[PlanRow]]:
    """Runs of consecutive slots in which at most MAX_PADDING of the tokens would be padding."""
    group: list[PlanRow] = []
    for row in sorted(rows, key=lambda r: r.slot):
        if group and not _fits(group, row):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _fits(group: list[PlanRow], row: PlanRow) -> bool:
    if row.slot != group[-1].slot + 1 or row.all_logits or group[-1].all_logits:
        return False
    if row.decoded != group[-1].decoded:
        return False
    lengths = [r.num_tokens for r in (*group, row)]
    return sum(lengths) >= (1.0 - MAX_PADDING) * max(lengths) * len(lengths)


def _batch(phase: Phase, rows: Sequence[PlanRow], *, every: bool) -> Batch:
    lengths = [row.num_tokens for row in rows]
    width = max(lengths)
    # Lists first, then one kind of call for all: cheaper than numpy's arithmetic on a few rows.
    return Batch(
        phase=phase,
        first_slot=rows[0].slot,
        token_ids=np.array([row.token_ids + [0] * (width - row.num_tokens) for row in rows], _I64),
        past_lens=np.array([row.start for row in rows], _I32),
        query_lens=np.array(lengths, _I32),
        context_lens=np.array([row.context_len for row in rows], _I32),
        logits_indices=np.array([_wanted(n, width if every else 1) for n in lengths], _I64),
    )


def _wanted(length: int, count: int) -> list[int]:
    """The last position of a row, or every one. A short row asks for its last one again."""
    return [length - 1] if count == 1 else [min(i, length - 1) for i in range(count)]
