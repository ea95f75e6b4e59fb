"""The grid of each block: the scale and integer zero point that its weights are rounded to.

A weight is (q - zero) * scale with q in 0 .. 2^bits - 1. A block's range is rarely the best grid: a
narrower one clips a few weights and is finer for all others. A few candidates are tried, each with
its least-squares scale, and the one with the least error weighted by importance is kept.
"""

import torch
from torch.nn.functional import pad

# Of the range; 1 is what round-to-nearest takes, so that the best is never worse than that.
FACTORS = (1.04, 1.0, 0.96, 0.92, 0.88, 0.83, 0.78, 0.73, 0.68, 0.62)
# A zero point rounded up as well as to the nearest.
ZERO_STEPS = (0, 1)
# Elements that are worked on at once: a few copies of them stay in a core's cache.
PIECE = 2**17
TINY = 1e-30

Tensor = torch.Tensor


def find_grid(rows: Tensor, importance: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point, float32 [n, ceil(K / block)] each, the zero points whole numbers.

    rows: float32 [n, K]. importance: float32 [K], not negative: what a squared error in this column
    costs. Zero is always on the grid. A block of zeros has scale 0 and zero point 0.
    """
    n, k = rows.shape
    tail = -k % block
    weights = pad(importance, (0, tail)).reshape(-1, block)
    count = len(weights)
    scale, zero = torch.empty(n, count), torch.empty(n, count)
    step = max(1, PIECE // (k + tail))
    for start in range(0, n, step):
        piece = pad(rows[start : start + step], (0, tail)).reshape(-1, block)
        found = _search(piece, weights.repeat(len(piece) // count, 1), 2**bits - 1)
        scale[start : start + step], zero[start : start + step] = (
            x.reshape(-1, count) for x in found
        )
    return scale, zero


def expand(values: Tensor, block: int, columns: int) -> Tensor:
    """[n, blocks] -> [n, columns], each value over its block."""
    return values.repeat_interleave(block, dim=1)[:, :columns]


def nearest(rows: Tensor, scale: Tensor, zero: Tensor, bits: int, block: int) -> Tensor:
    """The integers nearest to rows [n, K] on their grids, as float32 [n, K]."""
    wide_scale, wide_zero = (expand(x, block, rows.shape[1]) for x in (scale, zero))
    steps = torch.where(wide_scale > 0, rows / wide_scale.clamp(min=TINY), 0)
    return (steps + wide_zero).round_().clamp_(0, 2**bits - 1)


def values(q: Tensor, scale: Tensor, zero: Tensor, block: int) -> Tensor:
    """The weights that integers [n, K] stand for."""
    return (q - expand(zero, block, q.shape[1])) * expand(scale, block, q.shape[1])


def _search(x: Tensor, importance: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The best grid of each row of x [blocks, block]: scale [blocks, 1], zero [blocks, 1].

    With q and zero given, g = q - zero, the least error over all scales is
    sum(i x^2) - sum(i g x)^2 / sum(i g^2): the second term is the gain to be made large.
    """
    low = x.amin(1, keepdim=True).clamp_(max=0)
    step = (x.amax(1, keepdim=True).clamp_(min=0) - low) / top
    nearest_zero = (-low / step.clamp(min=TINY)).round_().clamp_(0, top)
    weighted = importance * x
    best = torch.full_like(step, -1.0)
    scale, zero = step.clone(), nearest_zero.clone()
    for factor in FACTORS:
        inverse = 1 / (step * factor).clamp(min=TINY)
        for shift in ZERO_STEPS:
            tried = (nearest_zero + shift).clamp_(0, top)
            g = torch.addcmul(tried, x, inverse).round_().clamp_(0, top).sub_(tried)
            product = (g * weighted).sum(1, keepdim=True)
            fitted = product / g.square_().mul_(importance).sum(1, keepdim=True).clamp_(min=TINY)
            gain = product * fitted
            better = (gain > best) & (fitted > 0)
            best = torch.where(better, gain, best)
            scale = torch.where(better, fitted, scale)
            zero = torch.where(better, tried, zero)
    return scale, zero
