"""From a plan to the arrays that a session runs."""

from collections.abc import Iterator, Sequence

import numpy as np

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.plan import PlanRow, StepPlan

MAX_PADDING = 0.25


def build_batches(plan: StepPlan) -> list[Batch]:
    """One decode batch, then prefill batches of neighbouring slots with like chunk lengths."""
    batches = [_batch("decode", plan.decode)] if plan.decode else []
    return batches + [_batch("prefill", rows) for rows in _groups(plan.prefill)]


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
    lengths = [r.num_tokens for r in (*group, row)]
    return sum(lengths) >= (1.0 - MAX_PADDING) * max(lengths) * len(lengths)


def _batch(phase: Phase, rows: Sequence[PlanRow]) -> Batch:
    lengths = [row.num_tokens for row in rows]
    token_ids = np.zeros((len(rows), max(lengths)), np.int64)
    for row, target in zip(rows, token_ids, strict=True):
        target[: row.num_tokens] = row.token_ids
    wanted = [range(n) if rows[0].all_logits else (n - 1,) for n in lengths]
    return Batch(
        phase=phase,
        first_slot=rows[0].slot,
        token_ids=token_ids,
        past_lens=np.array([row.start for row in rows], np.int32),
        query_lens=np.array(lengths, np.int32),
        context_lens=np.array([row.context_len for row in rows], np.int32),
        logits_indices=np.array([list(w) for w in wanted], np.int64),
    )
