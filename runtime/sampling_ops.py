"""Pure functions over one row of logits: selection, probabilities, the draw, logprobs.

Cost is what shapes this file: a vocabulary has up to 150k and more entries, and one full sort of
it takes several milliseconds. So selection looks for a threshold value and sorts a few thousand
entries at most, and big rows are weighed in float32 (relative error of a probability about 1e-6),
small ones in float64.

Order everywhere: larger logit first; between equal logits, lower token id first. Candidates are
kept in ascending token id, which is also the order of the inverse CDF.
"""

import math

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]
Bins = npt.NDArray[np.int16]

SMALL = 4096
"""Rows up to this many entries are sorted and weighed in float64 without further thought."""
_BINS = 512
_BLOCK = 512
_CHUNK = 16384
_LOWEST = np.float32(np.finfo(np.float32).min)
_MIN_TEMPERATURE = 1e-30
"""Smallest divisor: below it float32 division would make 0 / 0."""


def weights(values: F32, temperature: float) -> Floats:
    """exp((values - max) / temperature): unnormalised probabilities, the largest is 1."""
    with np.errstate(over="ignore", under="ignore"):
        wide = values.astype(np.float64) if values.size <= SMALL else values
        scaled: Floats = wide - wide.max()
        if temperature != 1.0:
            scaled /= scaled.dtype.type(max(temperature, _MIN_TEMPERATURE))
        np.exp(scaled, out=scaled)
        return scaled


def distribution(
    logits: F32, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Ids, npt.NDArray[np.float64]]:
    """What a token is drawn from: (token ids ascending, their probabilities, which sum to 1).

    `logits` [vocab] are after bias and penalties, without NaN or +inf and with one finite entry.
    Masked tokens (-inf) have probability 0, or are left out. `temperature` > 0.
    """
    ids, mass = candidates(logits, temperature, top_k, top_p, min_p)
    probs = mass.astype(np.float64)
    probs /= probs.sum()
    return (np.arange(logits.size) if ids is None else ids), probs


def candidates(
    logits: F32, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Ids | None, Floats]:
    """The tokens that may be drawn, ids ascending (None: all of them), and their weights.

    top_p sees the distribution that top_k left; min_p is relative to the most likely token.
    """
    ids: Ids | None = None
    values = logits
    if 0 < top_k < logits.size:
        ids = _top_k(logits, top_k)
        values = logits[ids]
    mass = weights(values, temperature)
    if top_p < 1.0:
        kept = _nucleus(values, mass, temperature, top_p)
        ids, mass = (kept if ids is None else ids[kept]), mass[kept]
    if min_p > 0.0:
        kept = np.flatnonzero(mass >= min_p)
        ids, mass = (kept if ids is None else ids[kept]), mass[kept]
    return ids, mass


def draw(mass: Floats, uniform: float) -> int:
    """Inverse CDF: the first index whose cumulated share of `mass` exceeds `uniform` in [0, 1)."""
    upto = np.cumsum(_block_sums(mass))
    target = uniform * float(upto[-1])
    block = min(int(np.searchsorted(upto, target, side="right")), upto.size - 1)
    before = float(upto[block - 1]) if block else 0.0
    start = block * _BLOCK
    return start + _draw_small(mass[start : start + _BLOCK], target - before)


def _block_sums(mass: Floats) -> npt.NDArray[np.float64]:
    starts = np.arange(0, mass.size, _BLOCK)
    return np.add.reduceat(mass, starts).astype(np.float64)


def _total(mass: Floats) -> float:
    return float(_block_sums(mass).sum())


def _draw_small(mass: Floats, target: float) -> int:
    index = int(np.searchsorted(np.cumsum(mass, dtype=np.float64), target, side="right"))
    if index < mass.size:
        return index
    # Rounding put the target at the very end: the last token that can be drawn.
    return int(np.flatnonzero(mass)[-1])


def top_logprobs(logits: F32, token_id: int, num: int) -> dict[int, tuple[float, int]]:
    """token -> (logprob, rank) of `token_id`, first, then of the `num` most likely tokens.

    Log-softmax of `logits` [vocab]. Rank is 1 + the tokens with a strictly greater logit.
    """
    peak = float(logits.max())
    # Of the shifted logits: subtracting in this order keeps large logits exact.
    log_total = math.log(_total(weights(logits, 1.0)))
    chosen = logits[token_id]
    rank = 1 + int(np.count_nonzero(logits > chosen))
    result = {token_id: (float(chosen) - peak - log_total, rank)}
    if num > 0:
        ids = _top_k(logits, min(num, logits.size))
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        values = logits[ids]
        ranks = 1 + np.searchsorted(-values, -values, side="left")
        for token, value, place in zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True):
            result.setdefault(token, (value - peak - log_total, place))
    return result


def _top_k(values: F32, k: int) -> Ids:
    """Indices of the k largest values that are not -inf, ascending."""
    if k * 8 <= values.size or values.size <= SMALL:
        return _first(values, max(_kth_largest(values, k), _LOWEST), k)
    threshold, count = _shortest_prefix(values, np.ones_like(values), k, _LOWEST)
    return _first(values, threshold, count)


def _nucleus(values: F32, mass: Floats, temperature: float, top_p: float) -> Ids:
    """Indices of the fewest most likely values whose probability reaches top_p, ascending."""
    total = _total(mass)
    # All that weigh less than this make up less than 1 - top_p, so none of them is needed.
    negligible = 0.99 * (1.0 - top_p) * total / mass.size
    low = np.float32(float(values.max()) + temperature * math.log(negligible))
    floor = np.nextafter(low, -np.float32(np.inf))
    threshold, count = _shortest_prefix(values, mass, top_p * total, floor)
    return _first(values, threshold, count)


def _first(values: F32, threshold: np.float32, count: int) -> Ids:
    """Indices, ascending, of the first `count` values in order, given the last one's value."""
    indices = np.flatnonzero(values >= threshold)
    excess = indices.size - count
    if excess <= 0:
        return indices
    ties = np.flatnonzero(values[indices] == threshold)
    return np.delete(indices, ties[-excess:])


def _kth_largest(values: F32, k: int) -> np.float32:
    """The k-th largest value.

    The k-th largest of disjoint groups' maxima is a lower bound for it, and few values pass that
    bound, so a long row is read twice and hardly sorted. Grouping by columns lets the maxima be
    taken with vector instructions.
    """
    columns = max(4 * k, 2048)
    depth = values.size // columns
    if depth > 1:
        maxima = values[: depth * columns].reshape(depth, columns).max(axis=0)
        heads = np.concatenate((maxima, values[depth * columns :]))
        bound = np.partition(heads, heads.size - k)[heads.size - k]
        values = values[np.flatnonzero(values >= bound)]
    return np.float32(np.partition(values, values.size - k)[values.size - k])


def _shortest_prefix(
    values: F32, mass: Floats, target: float, floor: np.float32
) -> tuple[np.float32, int]:
    """The fewest values, in order, whose mass reaches `target`: (the last one's value, how many).

    Values below `floor` must not be needed for it. All others when even they do not reach it. A
    histogram by value finds the bin in which the target is reached; only that bin is looked at
    further.
    """
    needed = values >= floor
    if values.size <= SMALL or 2 * np.count_nonzero(needed) < values.size:
        places = np.flatnonzero(needed)
        values, mass = values[places], mass[places]
    else:
        mass = mass * needed
    before, count = 0.0, 0
    for _ in range(8):
        low, high = max(values.min(), floor), values.max()
        if values.size <= SMALL or low == high:
            break
        bins, per_bin = _histogram(values, mass, low, high)
        reached = int(np.searchsorted(before + np.cumsum(per_bin), target))
        chosen = min(reached, int(np.flatnonzero(per_bin)[-1]))
        before += float(per_bin[:chosen].sum())
        count += int(np.count_nonzero(bins < chosen))
        inside = np.flatnonzero(bins == chosen)
        values, mass = values[inside], mass[inside]
    places = np.flatnonzero(values >= floor)
    values, mass = values[places], mass[places]
    order = np.argsort(-values, kind="stable")
    upto = before + np.cumsum(mass[order], dtype=np.float64)
    last = min(int(np.searchsorted(upto, target)), order.size - 1)
    return np.float32(values[order[last]]), count + last + 1


def _histogram(
    values: F32, mass: Floats, low: np.float32, high: np.float32
) -> tuple[Bins, npt.NDArray[np.float64]]:
    """(bin of each value, mass of each bin): `high` is in bin 0, `low` and less in the last.

    In chunks that stay in the processor's cache: memory fresh from the system costs more than the
    arithmetic here.
    """
    scale = np.float32(min((_BINS - 1) / (float(high) - float(low)), 1e30))
    bins: Bins = np.empty(values.size, np.int16)
    per_bin = np.zeros(_BINS)
    for start in range(0, values.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        with np.errstate(over="ignore"):
            scaled = (high - values[part]) * scale
        bins[part] = np.minimum(scaled, np.float32(_BINS - 1))
        per_bin += np.bincount(bins[part], weights=mass[part], minlength=_BINS)
    return bins, per_bin
