"""What a format is expected to cost on a weight, and which weights to spare.

A cost is in nats a token: the divergence from the model that the change of this one weight is
expected to cause (how: `exporter/calibration/statistics.py`). Costs of different weights add up, so
they can be compared, summed over packed weights and set against a limit.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from trtllm_lite.exporter.calibration.gptq import expected_error, factorize
from trtllm_lite.exporter.calibration.grid import find_grid, nearest, values
from trtllm_lite.exporter.calibration.quantizer import damped
from trtllm_lite.exporter.calibration.statistics import (
    LEVELS,
    InputStatistics,
    LinearStatistics,
    Statistics,
)

Tensor = torch.Tensor
Costs = Mapping[str, float]


def block_costs(model: Any, statistics: Statistics, bits: int, block: int) -> dict[str, float]:
    """Of integer blocks made by `CalibratedQuantizer`, for every weight that has statistics."""
    costs = {}
    for inputs, names in _by_inputs(statistics):
        factor = None if inputs.moment is None else factorize(inputs.moment)
        for name in names:
            rows = model.get_parameter(name).detach().float()
            scale, zero = find_grid(rows, damped(inputs.power), bits, block)
            if factor is not None:
                errors = expected_error(factor, scale, block)
            else:
                changed = values(nearest(rows, scale, zero, bits, block), scale, zero, block)
                errors = (rows - changed).square() @ inputs.power
            costs[name] = _nats(statistics[name], errors)
    return costs


def row_costs(model: Any, statistics: Statistics) -> dict[str, float]:
    """Of `w8a8`: int8 activations with one scale a token, int8 weights with one scale a row. Large
    where a few features are far above all others."""
    costs = {}
    for name, known in statistics.items():
        rows = model.get_parameter(name).detach().float()
        step = rows.abs().amax(1) / LEVELS
        errors = rows.square() @ known.inputs.rounding
        errors += step.square() / 12 * known.inputs.power.sum()
        costs[name] = _nats(known, errors)
    return costs


def grouped(costs: Costs, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The costs of packed weights: each is the sum of its parts'. A part without statistics counts
    nothing: no token ever reached it."""
    return {name: sum(costs.get(p, 0.0) for p in parts) for name, parts in groups.items()}


def spare_within(costs: Costs, extra_bytes: Mapping[str, int], budget: int) -> tuple[str, ...]:
    """The weights to keep in a larger format so that the most nats are saved for `budget` bytes.

    extra_bytes: what keeping a weight takes, positive. The greatest saving per byte goes first; one
    that does not fit is passed over for smaller ones.
    """
    kept = []
    for name in sorted(costs, key=lambda x: (-costs[x] / extra_bytes[x], x)):
        if extra_bytes[name] <= budget and costs[name] > 0:
            kept.append(name)
            budget -= extra_bytes[name]
    return tuple(kept)


def worst_projections(costs: Costs, limit: float) -> tuple[str, ...]:
    """The fewest weights to spare, worst first, so that the others cost at most `limit` nats."""
    total, kept = sum(costs.values()), []
    for name in sorted(costs, key=lambda x: (-costs[x], x)):
        if total <= limit:
            break
        kept.append(name)
        total -= costs[name]
    return tuple(kept)


def _nats(known: LinearStatistics, errors: Tensor) -> float:
    """errors: mean square of the change of each output, [N]."""
    return float(known.fisher @ errors) / 2


def _by_inputs(statistics: Statistics) -> Iterable[tuple[InputStatistics, list[str]]]:
    groups: dict[int, tuple[InputStatistics, list[str]]] = {}
    for name, known in statistics.items():
        groups.setdefault(id(known.inputs), (known.inputs, []))[1].append(name)
    return groups.values()
