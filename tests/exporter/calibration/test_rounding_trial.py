"""Rounding as formats do it, against loops, and what it costs a model."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trtllm_lite.exporter.calibration.rounding_trial import Rounding, RoundingTrial
from trtllm_lite.exporter.families import BASE, PROVED, tiny_config


def slow(row: Any, bits: int) -> Any:
    """One block, by the book."""
    if bits == 8:
        step = max(np.abs(row).max() / 127, 1e-30)
        return np.round(row / step) * step
    low, high = min(row.min(), 0), max(row.max(), 0)
    step = max((high - low) / (2**bits - 1), 1e-30)
    zero = np.round(-low / step)
    return (np.clip(np.round(row / step + zero), 0, 2**bits - 1) - zero) * step


@pytest.mark.parametrize("block", [None, 8, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_block_is_rounded_on_its_own(bits: int, block: int | None) -> None:
    x = torch.randn(5, 44, generator=torch.Generator().manual_seed(0)) * 3
    x[2, :8] = 0
    rounding = Rounding(bits, block, 1.0)
    step = block or 44
    for kind, made in ((bits, rounding.weights(x)), (8, rounding.activations(x))):
        for start in range(0, 44, step):
            want = [slow(row, kind) for row in x.double().numpy()[:, start : start + step]]
            got = made[:, start : start + step].double().numpy()
            # A value halfway between two steps may go to either.
            assert np.isclose(got, want, rtol=1e-5, atol=1e-6).mean() > 0.99


def test_fewer_bits_cost_more_and_no_rounding_costs_nothing() -> None:
    torch.manual_seed(0)
    config = tiny_config(next(f for f in PROVED if f.name == "Llama 3"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    text = np.random.default_rng(1).integers(0, BASE["vocab_size"], (3, 24))
    costs = [
        RoundingTrial(model, text, roundings).loss()
        for roundings in ((), (Rounding(8, 32, 1.0),), (Rounding(8, None, 1.0),))
    ]
    fine, coarse = (
        RoundingTrial(model, text, (Rounding(bits, 32, 1.0),)).loss() for bits in (8, 4)
    )
    assert costs[0] == 0 < costs[1] < costs[2]
    assert fine == costs[1] < coarse / 10
    both = RoundingTrial(model, text, (Rounding(8, 32, 0.5), Rounding(8, None, 1.0))).loss()
    assert both == pytest.approx(2 * costs[1] + costs[2])


def test_the_model_is_left_as_it_was() -> None:
    config = tiny_config(next(f for f in PROVED if f.name == "Llama 3"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    text = np.random.default_rng(1).integers(0, BASE["vocab_size"], (2, 16))
    ids = torch.from_numpy(text)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        RoundingTrial(model, text, (Rounding(4, 32, 1.0),)).loss()
        assert torch.equal(model(input_ids=ids).logits, before)
