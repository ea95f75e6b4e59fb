"""Two models on the same text, teacher-forced: what each predicts for the next token.

Perplexity is exp of the mean negative log-likelihood of the text's own next tokens. The divergence
is KL(reference || other) of the whole distribution, in nats: it sees what perplexity averages away.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# Rows that are compared at once: a few copies of them are made, and vocabularies are large.
PIECE = 64


@dataclass(frozen=True)
class Quality:
    """Means over `num_tokens` predicted tokens.

    ppl, ref_ppl: perplexity of the measured model and of the reference. kl: nats a token. top1:
    share of positions where both have the same most likely token.
    """

    ppl: float
    ref_ppl: float
    kl: float
    top1: float
    num_tokens: int

    @property
    def ppl_ratio(self) -> float:
        """Perplexity over the reference's: 1.01 is one percent worse. NaN when the measured one
        is not a number."""
        return self.ppl / self.ref_ppl


@dataclass(frozen=True)
class Sums:
    """What a Quality is made of, for some of the tokens; sums of disjoint tokens add up."""

    nll: float = 0.0
    ref_nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.nll + other.nll,
            self.ref_nll + other.ref_nll,
            self.kl + other.kl,
            self.agreed + other.agreed,
            self.tokens + other.tokens,
        )

    def quality(self) -> Quality:
        """Raises ValueError when nothing was compared."""
        if self.tokens == 0:
            raise ValueError("no token was compared")
        n = self.tokens
        return Quality(
            ppl=_exp(self.nll / n),
            ref_ppl=_exp(self.ref_nll / n),
            kl=self.kl / n,
            top1=self.agreed / n,
            num_tokens=n,
        )


def compare(reference: Array, other: Array, next_ids: Array) -> Sums:
    """Logits of two models [tokens, vocab] for the same positions, and the tokens that followed,
    [tokens] integer. A NaN among `other`'s logits makes the sums NaN: it fails every limit."""
    pieces = (slice(start, start + PIECE) for start in range(0, len(next_ids), PIECE))
    return sum((_compare(reference[p], other[p], next_ids[p]) for p in pieces), Sums())


def _compare(reference: Array, other: Array, next_ids: Array) -> Sums:
    p, q = _log_softmax(reference), _log_softmax(other)
    rows = np.arange(len(next_ids))
    agreed = reference.argmax(axis=1) == other.argmax(axis=1)
    return Sums(
        nll=-float(q[rows, next_ids].sum(dtype=np.float64)),
        ref_nll=-float(p[rows, next_ids].sum(dtype=np.float64)),
        kl=_kl(p, q),
        agreed=int(agreed.sum()),
        tokens=len(next_ids),
    )


def total(parts: Iterable[Sums]) -> Quality:
    """The quality over all parts. Raises ValueError when there is none."""
    return sum(parts, Sums()).quality()


def _kl(p: Array, q: Array) -> float:
    """Sum over rows. Where the reference gives no chance at all, the other's does not count."""
    with np.errstate(invalid="ignore"):
        terms = np.exp(p) * (p - q)
    terms[np.isneginf(p)] = 0.0
    return float(terms.sum(dtype=np.float64))


def _log_softmax(logits: Array) -> Array:
    """Float32 is enough: the logits themselves are, and the sums over tokens are float64."""
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        sums = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
        made: Array = shifted - np.log(sums).astype(np.float32)
    return made


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
