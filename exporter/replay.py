"""Drives a session directly, without the engine: prefill in chunks, decode, collect logits.

Rows of a group share every run, right-padded, each from its own slot.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.base import Batch, Session

Array = npt.NDArray[Any]


def prefill(session: Session, prompts: Sequence[Sequence[int]], chunk: int | None = None) -> Array:
    """Compute all tokens of the rows; returns the last token's logits, [rows, vocab].

    A row that is finished while others go on repeats its last token at the same position, which
    writes the same K and V again.
    """
    longest = max(len(p) for p in prompts)
    step = chunk or longest
    out: Array | None = None
    for start in range(0, longest, step):
        logits, live = _chunk(session, prompts, start, step)
        out = logits.copy() if out is None else np.where(live[:, None], logits, out)
    assert out is not None
    return out


def decode(
    session: Session, token_ids: Sequence[int], lengths: Sequence[int]
) -> npt.NDArray[np.float32]:
    """One step: the newest token of each row at position `lengths[row]`; logits [rows, vocab]."""
    rows = len(token_ids)
    batch = Batch(
        phase="decode",
        first_slot=0,
        token_ids=np.asarray(token_ids, np.int64)[:, None],
        past_lens=np.asarray(lengths, np.int32),
        query_lens=np.ones(rows, np.int32),
        context_lens=np.asarray(lengths, np.int32) + 1,
        logits_indices=np.zeros((rows, 1), np.int64),
    )
    return session.run(batch)[:, 0].copy()


def greedy(
    session: Session,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    recompute_at: int | None = None,
) -> tuple[list[list[int]], Array]:
    """Greedy tokens of each row and the logits they were chosen from, [num_tokens, rows, vocab].

    Where a row crosses `recompute_at`, all rows are computed again from their first token.
    """
    rows = [list(p) for p in prompts]
    seen = [prefill(session, rows)]
    while True:
        for row, token in zip(rows, seen[-1].argmax(axis=1), strict=True):
            row.append(int(token))
        if len(seen) == num_tokens:
            break
        if recompute_at is not None and any(len(row) == recompute_at + 1 for row in rows):
            seen.append(prefill(session, rows))
        else:
            seen.append(decode(session, [row[-1] for row in rows], [len(r) - 1 for r in rows]))
    tokens = [row[len(p) :] for row, p in zip(rows, prompts, strict=True)]
    return tokens, np.stack(seen)


def _chunk(
    session: Session, prompts: Sequence[Sequence[int]], start: int, step: int
) -> tuple[Array, Array]:
    """One prefill run over tokens [start, start + step); which rows it brought forward."""
    pieces = [list(p[start : start + step]) for p in prompts]
    live = np.array([bool(piece) for piece in pieces])
    past = [start if piece else len(p) - 1 for p, piece in zip(prompts, pieces, strict=True)]
    pieces = [piece or [p[-1]] for p, piece in zip(prompts, pieces, strict=True)]
    width = max(len(piece) for piece in pieces)
    ids = np.zeros((len(prompts), width), np.int64)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)] = piece
    counts = np.array([len(piece) for piece in pieces], np.int32)
    batch = Batch(
        phase="prefill",
        first_slot=0,
        token_ids=ids,
        past_lens=np.asarray(past, np.int32),
        query_lens=counts,
        context_lens=np.array([len(p) for p in prompts], np.int32),
        logits_indices=(counts.astype(np.int64) - 1)[:, None],
    )
    return session.run(batch)[:, 0], live
