"""The calibrated quantizer changes a model less than round-to-nearest does."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from trtllm_lite.exporter.calibration.quantizer import CalibratedQuantizer
from trtllm_lite.exporter.calibration.statistics import Statistics
from trtllm_lite.exporter.quantize.quantizer import (
    Quantized,
    Quantizer,
    RoundToNearest,
    dequantized,
)
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.short_float import rounded

BITS, BLOCK = 4, 16


def output_error(rows: Any, made: Quantized, moment: Any) -> float:
    change = rows - dequantized(made, BLOCK)
    return float(((change @ moment) * change).sum())


def powers_only(statistics: Statistics) -> Statistics:
    return {
        name: dataclasses.replace(s, inputs=dataclasses.replace(s.inputs, moment=None))
        for name, s in statistics.items()
    }


def test_the_more_is_known_the_less_changes(tiny_model: Any, statistics: Statistics) -> None:
    ladder: list[Quantizer] = [
        RoundToNearest(),
        CalibratedQuantizer(powers_only(statistics)),
        CalibratedQuantizer(statistics),
    ]
    errors = np.zeros(len(ladder))
    for name, known in statistics.items():
        rows = tiny_model.get_parameter(name).detach().numpy()
        assert known.inputs.moment is not None
        moment = known.inputs.moment.numpy()
        made = [q.quantize(name, rows, BITS, BLOCK) for q in ladder]
        errors += [output_error(rows, m, moment) for m in made]
    assert errors[1] < 0.97 * errors[0]
    assert errors[2] < 0.8 * errors[1]


def test_a_weight_without_statistics_is_searched() -> None:
    rows = np.random.default_rng(0).standard_t(3, (20, 128)).astype(np.float32)
    changes = [
        float(np.square(rows - dequantized(q.quantize("unknown", rows, BITS, 64), 64)).sum())
        for q in (CalibratedQuantizer({}), RoundToNearest())
    ]
    assert changes[0] < 0.96 * changes[1]


@pytest.mark.parametrize("known", [True, False])
def test_rows_may_come_in_pieces(tiny_model: Any, statistics: Statistics, known: bool) -> None:
    name = next(iter(statistics))
    rows = tiny_model.get_parameter(name).detach().numpy()
    quantizer = CalibratedQuantizer(statistics if known else {})
    whole = quantizer.quantize(name, rows, BITS, BLOCK)
    parts = [quantizer.quantize(name, rows[s], BITS, BLOCK) for s in (slice(0, 7), slice(7, None))]
    for field in dataclasses.fields(Quantized):
        pieces = [getattr(part, field.name) for part in parts]
        assert np.allclose(np.concatenate(pieces), getattr(whole, field.name), rtol=1e-5)


def test_shapes_and_types_are_those_of_the_format(statistics: Statistics) -> None:
    rows = np.ones((3, 40), np.float32)
    made = CalibratedQuantizer(statistics).quantize("unknown", rows, BITS, BLOCK)
    assert [x.shape for x in (made.q, made.scale, made.zero)] == [(3, 40), (3, 3), (3, 3)]
    assert [str(x.dtype) for x in (made.q, made.scale, made.zero)] == ["uint8", "float32", "uint8"]
    assert np.allclose(dequantized(made, BLOCK), rows, rtol=2.0**-11)
    assert np.array_equal(rounded(made.scale), made.scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_a_number_is_refused(bad: float) -> None:
    rows = np.full((1, 32), bad, np.float32)
    with pytest.raises(UnsupportedError, match=r"broken\.weight"):
        CalibratedQuantizer({}).quantize("broken.weight", rows, BITS, BLOCK)


def test_the_rows_that_were_given_are_left_alone(statistics: Statistics) -> None:
    name = next(iter(statistics))
    k = len(statistics[name].inputs.power)
    rows = torch.randn(4, k, generator=torch.Generator().manual_seed(0)).numpy()
    kept = rows.copy()
    CalibratedQuantizer(statistics).quantize(name, rows, BITS, BLOCK)
    assert np.array_equal(rows, kept)
