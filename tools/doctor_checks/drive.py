"""Runs of a session in the words of the checks: rows of tokens, and what each has already."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.base import Batch, Session
from trtllm_lite.runtime.manifest import Phase

Logits = npt.NDArray[np.float32]
Rows = Sequence[Sequence[int]]


def run_rows(
    session: Session,
    rows: Rows,
    past: Sequence[int],
    *,
    phase: Phase,
    first_slot: int = 0,
    every: bool = False,
) -> list[Logits]:
    """One run over consecutive slots, right-padded as the scheduler does. Per row a copy of the
    logits [1, vocab] of its last token, or [tokens, vocab] of all with `every`."""
    lengths = [len(row) for row in rows]
    width = max(lengths)
    wanted = [[min(i, n - 1) for i in range(width)] if every else [n - 1] for n in lengths]
    batch = Batch(
        phase=phase,
        first_slot=first_slot,
        token_ids=np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int64),
        past_lens=np.array(past, np.int32),
        query_lens=np.array(lengths, np.int32),
        context_lens=np.array([a + b for a, b in zip(past, lengths, strict=True)], np.int32),
        logits_indices=np.array(wanted, np.int64),
    )
    logits = session.run(batch)
    return [logits[i, : n if every else 1].copy() for i, n in enumerate(lengths)]


def prompt(
    session: Session, rows: Rows, *, first_slot: int = 0, every: bool = False
) -> list[Logits]:
    """Whole prompts into empty slots, in one run."""
    past = [0] * len(rows)
    return run_rows(session, rows, past, phase="prefill", first_slot=first_slot, every=every)


def extend(
    session: Session, rows: Rows, past: Sequence[int], *, first_slot: int = 0, every: bool = False
) -> list[Logits]:
    """Further pieces of prompts, over what the slots hold."""
    return run_rows(session, rows, past, phase="prefill", first_slot=first_slot, every=every)


def decode(
    session: Session, tokens: Sequence[int], past: Sequence[int], *, first_slot: int = 0
) -> list[Logits]:
    """One token a row."""
    rows = [[token] for token in tokens]
    return run_rows(session, rows, past, phase="decode", first_slot=first_slot)


def random_row(seed: int, length: int, vocab_size: int) -> list[int]:
    """Token ids that the same seed always gives."""
    return [int(x) for x in np.random.default_rng(seed).integers(0, vocab_size, length)]
