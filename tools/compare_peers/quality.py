"""How far a runtime's logits are from float32's on the same text, in numpy alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SKIP = 8  # first positions of a window, which have hardly any context
PIECE = 64  # positions at a time, so that a large vocabulary needs little memory


@dataclass(frozen=True)
class Quality:
    """Means over `tokens` positions: perplexity, the same of the reference, share of positions
    where the likeliest token is the reference's, and KL(reference || runtime) in nats."""

    perplexity: float
    reference_perplexity: float
    top1: float
    kl: float
    tokens: int


def score(
    logits_of: Callable[[list[int]], Array], windows: Sequence[Sequence[int]], reference: str
) -> Quality:
    """`reference` is a .npy file [windows, length, vocab] of float32's logits. Raises ValueError
    for logits of another shape, or that are not finite."""
    stored = np.load(reference, mmap_mode="r")
    sums, count = np.zeros(4), 0
    for window, expected in zip(windows, stored, strict=True):
        logits = logits_of(list(window))
        if logits.shape != expected.shape:
            raise ValueError(f"logits are {logits.shape}; the reference is {expected.shape}")
        if not np.isfinite(logits).all():
            raise ValueError("logits are not finite")
        for start in range(SKIP, len(window) - 1, PIECE):
            stop = min(start + PIECE, len(window) - 1)
            following = np.asarray(window[start + 1 : stop + 1])
            sums += _sums(logits[start:stop], expected[start:stop], following)
            count += stop - start
    nll, reference_nll, same, kl = (float(value) / count for value in sums)
    return Quality(math.exp(nll), math.exp(reference_nll), same, kl, count)


def _sums(logits: Array, expected: Array, following: Array) -> Array:
    """Of some positions: negative log-likelihood, the reference's, equal choices, divergence."""
    ours, theirs = log_softmax(logits), log_softmax(expected)
    rows = np.arange(len(following))
    same = ours.argmax(axis=1) == theirs.argmax(axis=1)
    kl = np.exp(theirs) * (theirs - ours)
    nll = -ours[rows, following].sum(dtype=np.float64)
    reference_nll = -theirs[rows, following].sum(dtype=np.float64)
    return np.array([nll, reference_nll, same.sum(), kl.sum(dtype=np.float64)])


def log_softmax(logits: Array) -> npt.NDArray[np.float32]:
    """Over the last axis, in float32."""
    shifted = logits.astype(np.float32)
    shifted -= shifted.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float32] = shifted - np.log(
        np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    ).astype(np.float32)
    return result
