"""What rounding costs a model, by trying it: its own predictions against those with every linear
module's activations and weights rounded, on a few tokens.

The second-order estimate of `exporter/calibration/costs.py` ranks weights against each other; here
it is measured whether the model as a whole gains from a change of all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import kl_div, linear, log_softmax, pad

from trtllm_lite.exporter.calibration.statistics import LEVELS, layer_linears

Array = npt.NDArray[Any]
Tensor = torch.Tensor
# Logits of so many tokens are held twice: few, as vocabularies are large.
WINDOWS = 2
TOKENS = 256
TINY = 1e-30


@dataclass(frozen=True)
class Rounding:
    """How a format rounds the two operands of a product.

    bits: of the weights, symmetric at 8 and with a zero point below; activations have 8. block:
    neighbouring inputs that share a scale; None is all of a token's or of a weight's row. limit:
    nats a token that the format may cost, against which formats are weighed.
    """

    bits: int
    block: int | None
    limit: float

    def weights(self, rows: Tensor) -> Tensor:
        """[N, K] rounded, float32."""
        return _by_blocks(rows, self.block, _symmetric if self.bits == 8 else self._ranged)

    def activations(self, x: Tensor) -> Tensor:
        """[tokens, K] rounded, float32."""
        return _by_blocks(x, self.block, _symmetric)

    def _ranged(self, blocks: Tensor) -> Tensor:
        top = 2**self.bits - 1
        low = blocks.amin(-1, keepdim=True).clamp(max=0)
        step = ((blocks.amax(-1, keepdim=True).clamp(min=0) - low) / top).clamp(min=TINY)
        zero = (-low / step).round()
        made: Tensor = ((blocks / step + zero).round().clamp(0, top) - zero) * step
        return made


class RoundingTrial:
    """Owns the tokens and the model's own predictions for them. windows: token ids [count,
    length], of which the last few are read."""

    def __init__(self, model: Any, windows: Array, roundings: Sequence[Rounding]) -> None:
        self._model = model
        self._windows = windows[-WINDOWS:, :TOKENS]
        self._roundings = roundings
        self._own = self._predictions() if roundings else None

    def loss(self) -> float:
        """KL(own || rounded), mean over tokens, over each rounding's limit, summed; 0 without
        roundings. The model must predict what it did when this was made."""
        return sum(self._divergence(rounding) / rounding.limit for rounding in self._roundings)

    def _divergence(self, rounding: Rounding) -> float:
        with _rounded(self._model, rounding):
            predicted = self._predictions()
        pairs = zip(predicted, self._own or (), strict=True)
        total = sum(float(kl_div(p, own, log_target=True, reduction="sum")) for p, own in pairs)
        return total / self._windows.size

    def _predictions(self) -> list[Tensor]:
        """All windows at once: weights are rounded anew in every call of the model."""
        ids = torch.from_numpy(np.asarray(self._windows, np.int64))
        with torch.no_grad():
            logits = self._model(input_ids=ids, use_cache=False).logits
        return [log_softmax(row.float(), dim=-1) for row in logits]


@contextmanager
def _rounded(model: Any, rounding: Rounding) -> Iterator[None]:
    """The modules' `forward` is covered by one of their own attributes, which goes again."""

    def covering(module: torch.nn.Linear) -> Any:
        def forward(x: Tensor) -> Tensor:
            rounded = rounding.activations(x.reshape(-1, x.shape[-1])).view(x.shape)
            return linear(rounded, rounding.weights(module.weight.detach()), module.bias)

        return forward

    modules = list(layer_linears(model).values())
    for module in modules:
        vars(module)["forward"] = covering(module)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def _by_blocks(x: Tensor, block: int | None, rounded: Any) -> Tensor:
    width = x.shape[1]
    if block is None:
        made: Tensor = rounded(x)
        return made
    blocks = pad(x, (0, -width % block)).reshape(len(x), -1, block)
    whole: Tensor = rounded(blocks).reshape(len(x), -1)[:, :width]
    return whole


def _symmetric(x: Tensor) -> Tensor:
    step = (x.abs().amax(-1, keepdim=True) / LEVELS).clamp(min=TINY)
    return (x / step).round() * step
