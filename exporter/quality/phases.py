"""The quality of a bundle's two graphs, each measured with the weights that its phase uses.

Prefill reads whole windows of the text; decode reads them token by token, a few windows at once in
the session's slots. The reference's logits of those windows are held meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtllm_lite.exporter.quality.measure import Quality, Sums, compare, total
from trtllm_lite.exporter.replay import decode
from trtllm_lite.runtime.backends.base import Batch, Session
from trtllm_lite.runtime.progress import Progress

Array = npt.NDArray[Any]
# Windows that are read at once: as many as `verify` opens slots for, and as reference logits of so
# many bytes allow.
ROWS = 4
LOGITS_BYTES = 2**29


class LogitsSource(Protocol):
    """What the session is compared with: `exporter.reference.Reference` is one."""

    def logits(self, token_ids: list[int], last: int) -> Array:
        """Logits of the last `last` positions, [last, vocab] float32."""


@dataclass(frozen=True)
class PhaseQuality:
    """The quality of each graph on the same text. long: prefill's, far behind the beginning of a
    prompt; None where it was not measured."""

    prefill: Quality
    decode: Quality
    long: Quality | None = None


def measure_phases(
    session: Session, reference: LogitsSource, windows: Array, vocab_size: int, progress: Progress
) -> PhaseQuality:
    """Measure both graphs on `windows` [count, length] of token ids.

    The session needs ROWS slots of `length` tokens and holds nothing that is needed afterwards.
    Decode's cache is its own from the first token on: what is measured are its weights alone.
    """
    prefilled: list[Sums] = []
    decoded: list[Sums] = []
    rows = min(ROWS, max(1, LOGITS_BYTES // (4 * windows.shape[1] * vocab_size)))
    for start in range(0, len(windows), rows):
        group = windows[start : start + rows]
        expected = [reference.logits([int(t) for t in w], len(w))[:-1] for w in group]
        for window, logits in zip(group, expected, strict=True):
            prefilled.append(compare(logits, prefill_logits(session, window)[:-1], window[1:]))
        for position, logits in decode_logits(session, group):
            right = np.stack([e[position] for e in expected])
            decoded.append(compare(right, logits, group[:, position + 1]))
        progress.advance(min(start + rows, len(windows)), len(windows), "windows of text")
    return PhaseQuality(total(prefilled), total(decoded))


def prefill_logits(session: Session, window: Array) -> Array:
    """Logits of all positions of one window, computed in one chunk: [length, vocab] float32."""
    logits: Array = _prefill(session, window[None], np.arange(len(window)))[0]
    return logits


def measure_long(session: Session, reference: LogitsSource, window: Array, last: int) -> Quality:
    """Prefill's quality at the `last` positions of one window [length] that predict a token of it,
    computed in one chunk. The session needs a slot of `length` tokens."""
    length = len(window)
    expected = reference.logits([int(t) for t in window], last + 1)[:-1]
    positions = np.arange(length - 1 - last, length - 1)
    logits = _prefill(session, window[None], positions)[0]
    return total([compare(expected, logits, window[-last:])])


def decode_logits(session: Session, windows: Array) -> Iterator[tuple[int, Array]]:
    """Positions 0 .. length - 2 of the windows, and decode's logits there: [rows, vocab] float32,
    of the token that follows each."""
    rows, length = windows.shape
    for position in range(length - 1):
        ids = [int(t) for t in windows[:, position]]
        yield position, decode(session, ids, [position] * rows)


def _prefill(session: Session, windows: Array, positions: Array) -> Array:
    """Compute the windows from their first token; logits at `positions`."""
    rows, length = windows.shape
    lengths = np.full(rows, length, np.int32)
    batch = Batch(
        phase="prefill",
        first_slot=0,
        token_ids=np.ascontiguousarray(windows, np.int64),
        past_lens=np.zeros(rows, np.int32),
        query_lens=lengths,
        context_lens=lengths,
        logits_indices=np.tile(positions.astype(np.int64), (rows, 1)),
    )
    return session.run(batch).copy()
