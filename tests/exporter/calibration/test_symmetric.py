"""Symmetric grids: zero in the middle, and the more is known the less changes."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from trtllm_lite.exporter.calibration.statistics import Statistics
from trtllm_lite.exporter.calibration.symmetric import SymmetricQuantizer
from trtllm_lite.exporter.quantize.quantizer import Quantized, Quantizer, dequantized
from trtllm_lite.runtime.errors import UnsupportedError

BITS, BLOCK = 4, 16


class PlainSymmetric:
    """By the block's largest magnitude."""

    def quantize(
        self, name: str, rows: Any, bits: int, block: int, scales: str = "float32"
    ) -> Quantized:
        blocks = rows.reshape(len(rows), -1, block)
        scale = np.abs(blocks).max(-1) / 7
        q = np.rint(blocks / scale[..., None]) + 8
        zero = np.full(scale.shape, 8, np.uint8)
        return Quantized(q.reshape(rows.shape).astype(np.uint8), scale, zero)


def error(rows: Any, made: Quantized, moment: Any) -> float:
    change = rows - dequantized(made, BLOCK)
    return float(((change @ moment) * change).sum())


def test_the_more_is_known_the_less_changes(tiny_model: Any, statistics: Statistics) -> None:
    powers = {
        name: dataclasses.replace(s, inputs=dataclasses.replace(s.inputs, moment=None))
        for name, s in statistics.items()
    }
    ladder: list[Quantizer] = [
        PlainSymmetric(),
        SymmetricQuantizer(powers),
        SymmetricQuantizer(statistics),
    ]
    errors = np.zeros(len(ladder))
    for name, known in statistics.items():
        rows = tiny_model.get_parameter(name).detach().numpy()
        assert known.inputs.moment is not None
        made = [q.quantize(name, rows, BITS, BLOCK) for q in ladder]
        errors += [error(rows, m, known.inputs.moment.numpy()) for m in made]
    assert errors[1] < 0.97 * errors[0]
    assert errors[2] < 0.8 * errors[1]


def test_zero_is_in_the_middle(tiny_model: Any, statistics: Statistics) -> None:
    name = next(iter(statistics))
    rows = tiny_model.get_parameter(name).detach().numpy() + np.float32(0.2)
    for bits in (4, 8):
        made = SymmetricQuantizer(statistics).quantize(name, rows, bits, BLOCK)
        assert (made.zero == 2 ** (bits - 1)).all()
        assert made.q.max() < 2**bits


def test_what_is_not_finite_is_refused() -> None:
    rows = np.full((2, 16), np.nan, np.float32)
    with pytest.raises(UnsupportedError, match="quantizing NaN"):
        SymmetricQuantizer({}).quantize("w", rows, BITS, BLOCK)
