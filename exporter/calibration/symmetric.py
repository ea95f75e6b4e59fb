"""Symmetric integers: GPTQ, or rounding to nearest, on grids about zero.

The same as `CalibratedQuantizer`, for operators that have no zero points.
"""

import numpy as np
import numpy.typing as npt
import torch

from trtllm_lite.exporter.calibration.grid import FACTORS, TINY
from trtllm_lite.exporter.calibration.quantizer import CalibratedQuantizer
from trtllm_lite.exporter.quantize.quantizer import Quantized, RoundToNearest, blocked

Tensor = torch.Tensor


class SymmetricQuantizer(CalibratedQuantizer):
    """Grids about zero, searched with the inputs' power where that is known. 8 bits are rounded to
    nearest."""

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
        return super().quantize(name, rows, bits, block, scales)

    def _grid(
        self, weights: Tensor, importance: Tensor, bits: int, block: int
    ) -> tuple[Tensor, Tensor]:
        scale = symmetric_scales(weights, importance, bits, block)
        return scale, torch.full_like(scale, 2.0 ** (bits - 1))


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
