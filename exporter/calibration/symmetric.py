"""Symmetric integers: GPTQ, or rounding to nearest, on grids about zero.

The same as `CalibratedQuantizer`, for operators that have no zero points.
"""

import numpy as np
import numpy.typing as npt
import torch

from trtllm_lite.exporter.calibration.gptq import Factor, factorize, round_with_feedback
from trtllm_lite.exporter.calibration.grid import FACTORS, TINY, nearest
from trtllm_lite.exporter.calibration.quantizer import damped
from trtllm_lite.exporter.calibration.statistics import InputStatistics, Statistics
from trtllm_lite.exporter.quantize.quantizer import (
    Quantized,
    RoundToNearest,
    blocked,
    finite,
    short_scale,
)

Tensor = torch.Tensor


class SymmetricQuantizer:
    """GPTQ where the inputs' second moment is known; otherwise the nearest integers. Grids are
    searched with the inputs' power where that is known. 8 bits are rounded to nearest."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._last: tuple[InputStatistics, Factor] | None = None

    def quantize(
        self,
        name: str,
        rows: npt.NDArray[np.float32],
        bits: int,
        block: int,
        scales: str = "float32",
    ) -> Quantized:
        """rows: float32 [n, K] of the parameter `name`; K is a multiple of `block`. Raises
        UnsupportedError for NaN and infinity."""
        if bits == 8:
            return RoundToNearest().quantize(name, rows, bits, block, scales)
        weights = torch.from_numpy(np.array(finite(name, rows), np.float32))
        known = self._statistics.get(name)
        importance = torch.ones(weights.shape[1]) if known is None else damped(known.inputs.power)
        found = symmetric_scales(weights, importance, bits, block)
        scale = torch.from_numpy(short_scale(name, found.numpy(), scales))
        zero = torch.full_like(scale, 2.0 ** (bits - 1))
        if known is None or known.inputs.moment is None:
            q = nearest(weights, scale, zero, bits, block)
        else:
            factor = self._factor(known.inputs, known.inputs.moment)
            q = round_with_feedback(weights, factor, scale, zero, bits, block)
        return Quantized(q.to(torch.uint8).numpy(), scale.numpy(), zero.to(torch.uint8).numpy())

    def _factor(self, inputs: InputStatistics, moment: Tensor) -> Factor:
        if self._last is None or self._last[0] is not inputs:
            self._last = (inputs, factorize(moment))
        return self._last[1]


def symmetric_scales(rows: Tensor, importance: Tensor, bits: int, block: int) -> Tensor:
    """The scale of each block, [n, K / block], by the least error weighted by importance [K] over a
    few clippings of the block's range, each with its least-squares scale."""
    x = torch.from_numpy(blocked(rows.numpy(), block))
    weights = importance.reshape(-1, block)
    low, top = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    step = x.abs().amax(2, keepdim=True) / top
    scale: Tensor = step.clone()
    best = torch.full_like(step, -1.0)
    for factor in FACTORS:
        g = (x / (step * factor).clamp(min=TINY)).round_().clamp_(low, top)
        product = (weights * g * x).sum(2, keepdim=True)
        fitted = product / (weights * g.square()).sum(2, keepdim=True).clamp(min=TINY)
        better = (product * fitted > best) & (fitted > 0)
        best = torch.where(better, product * fitted, best)
        scale = torch.where(better, fitted, scale)
    made: Tensor = scale.squeeze(2)
    return made
