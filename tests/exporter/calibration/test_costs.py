"""Costs order the weights as trying each of them would, and choices respect their limits."""

import dataclasses
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.exporter.calibration.costs import (
    block_costs,
    grouped,
    row_costs,
    spare_within,
    worst_projections,
)
from trtllm_lite.exporter.calibration.quantizer import CalibratedQuantizer
from trtllm_lite.exporter.calibration.statistics import (
    Statistics,
    layer_linears,
    rounded_per_token,
)
from trtllm_lite.exporter.quantize.quantizer import dequantized, per_channel

BITS, BLOCK = 4, 16
COSTS = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(0, 10), max_size=6)


def divergence(model: Any, windows: Any, name: str, weight: Any, *, rounded: bool) -> float:
    """Of the model with one changed weight, and inputs rounded a token at a time when asked."""
    ids = torch.from_numpy(windows)
    parameter, module = model.get_parameter(name), layer_linears(model)[name[: -len(".weight")]]
    kept = parameter.detach().clone()
    with torch.no_grad():
        before = torch.log_softmax(model(input_ids=ids).logits.double(), -1)
        parameter.copy_(torch.from_numpy(weight))
        handle = module.register_forward_pre_hook(
            lambda _m, args: (
                rounded_per_token(args[0].flatten(0, 1)).view_as(args[0]) if rounded else args[0]
            )
        )
        after = torch.log_softmax(model(input_ids=ids).logits.double(), -1)
        handle.remove()
        parameter.copy_(kept)
    return float((before.exp() * (before - after)).sum(-1).mean())


def test_four_bit_costs_are_what_is_measured(
    tiny_model: Any, windows: Any, statistics: Statistics
) -> None:
    quantizer = CalibratedQuantizer(statistics)
    for name, cost in block_costs(tiny_model, statistics, BITS, BLOCK).items():
        rows = tiny_model.get_parameter(name).detach().numpy()
        made = dequantized(quantizer.quantize(name, rows, BITS, BLOCK), BLOCK)
        measured = divergence(tiny_model, windows, name, made, rounded=False)
        assert measured / 4 < cost < measured * 4


def test_row_costs_are_what_is_measured(
    tiny_model: Any, windows: Any, statistics: Statistics
) -> None:
    for name, cost in row_costs(tiny_model, statistics).items():
        q, scale = per_channel(name, tiny_model.get_parameter(name).detach().numpy())
        made = q.astype(np.float32) * scale[:, None]
        measured = divergence(tiny_model, windows, name, made, rounded=True)
        assert measured / 4 < cost < measured * 4


def test_an_outlying_feature_is_expensive(tiny_model: Any, statistics: Statistics) -> None:
    """What rounding to the largest feature does to all others decides."""
    name = next(n for n in statistics if "down_proj" in n)
    known = statistics[name]
    loud = dataclasses.replace(known.inputs, rounding=known.inputs.rounding * 100)
    changed = {**statistics, name: dataclasses.replace(known, inputs=loud)}
    before, after = row_costs(tiny_model, statistics), row_costs(tiny_model, changed)
    assert after[name] > 5 * before[name]
    assert {n: c for n, c in after.items() if n != name} == {
        n: c for n, c in before.items() if n != name
    }


def test_costs_without_moments_are_of_the_same_size(
    tiny_model: Any, statistics: Statistics
) -> None:
    bare = {
        name: dataclasses.replace(s, inputs=dataclasses.replace(s.inputs, moment=None))
        for name, s in statistics.items()
    }
    rich = block_costs(tiny_model, statistics, BITS, BLOCK)
    for name, cost in block_costs(tiny_model, bare, BITS, BLOCK).items():
        assert rich[name] < 1.5 * cost < 15 * rich[name]


def test_a_packed_weight_costs_what_its_parts_do() -> None:
    costs = {"q": 1.0, "k": 0.5, "o": 2.0}
    assert grouped(costs, {"q+k": ("q", "k"), "o": ("o",), "x": ("x",)}) == {
        "q+k": 1.5,
        "o": 2.0,
        "x": 0.0,
    }


@given(COSTS, st.floats(0, 30))
def test_the_fewest_are_spared(costs: dict[str, float], limit: float) -> None:
    kept = worst_projections(costs, limit)

    def rest(names: Any) -> float:
        return sum(c for n, c in costs.items() if n not in names)

    assert rest(kept) <= limit + 1e-9
    for fewer in combinations(costs, max(0, len(kept) - 1)):
        assert not kept or rest(fewer) > limit - 1e-9


@given(COSTS, st.integers(0, 60), st.integers(1, 9))
def test_the_budget_is_kept_and_spent(costs: dict[str, float], budget: int, size: int) -> None:
    sizes = {name: size + len(name) for name in costs}
    kept = spare_within(costs, sizes, budget)
    used = sum(sizes[n] for n in kept)
    assert used <= budget
    left = [n for n in costs if n not in kept]
    assert all(sizes[n] > budget - used or costs[n] == 0 for n in left)


@pytest.mark.parametrize("budget", [0, 4, 9])
def test_the_greatest_saving_a_byte_goes_first(budget: int) -> None:
    costs, sizes = {"small": 3.0, "large": 5.0, "free": 0.0}, {"small": 4, "large": 9, "free": 1}
    want = {0: (), 4: ("small",), 9: ("small",)}
    assert spare_within(costs, sizes, budget) == want[budget]
