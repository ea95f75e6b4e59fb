"""Quantizers that know what flows through a weight: better integers than round-to-nearest."""

import numpy as np
import numpy.typing as npt
import torch

from trtllm_lite.exporter.calibration.gptq import Factor, factorize, round_with_feedback
from trtllm_lite.exporter.calibration.grid import find_grid, nearest
from trtllm_lite.exporter.calibration.statistics import InputStatistics, Statistics
from trtllm_lite.exporter.quantize.quantizer import Quantized, finite, short_scale

Tensor = torch.Tensor


class CalibratedQuantizer:
    """GPTQ on searched grids where the inputs' second moment is known, grids weighted by the
    inputs' power where only that is, and a plain search for the least squared error otherwise.

    Rows may come in any pieces; a weight's rows are independent. Holds one factorized moment, that
    of the last weight, since weights with the same inputs come one after the other.
    """

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
        """rows: float32 [n, K] of the parameter `name`. Raises UnsupportedError for NaN and
        infinity."""
        weights = torch.from_numpy(np.array(finite(name, rows), np.float32))
        known = self._statistics.get(name)
        importance = torch.ones(weights.shape[1]) if known is None else damped(known.inputs.power)
        found, zero = self._grid(weights, importance, bits, block)
        scale = torch.from_numpy(short_scale(name, found.numpy(), scales))
        if known is None or known.inputs.moment is None:
            q = nearest(weights, scale, zero, bits, block)
        else:
            factor = self._factor(known.inputs, known.inputs.moment)
            q = round_with_feedback(weights, factor, scale, zero, bits, block)
        return Quantized(q.to(torch.uint8).numpy(), scale.numpy(), zero.to(torch.uint8).numpy())

    def _grid(
        self, weights: Tensor, importance: Tensor, bits: int, block: int
    ) -> tuple[Tensor, Tensor]:
        """Scale and zero point of each block, [n, K / block] both."""
        return find_grid(weights, importance, bits, block)

    def _factor(self, inputs: InputStatistics, moment: Tensor) -> Factor:
        if self._last is None or self._last[0] is not inputs:
            self._last = (inputs, factorize(moment))
        return self._last[1]


def damped(power: Tensor) -> Tensor:
    """The power of inputs with a floor: a feature that the text never used may matter elsewhere."""
    return power + 0.01 * power.mean()
