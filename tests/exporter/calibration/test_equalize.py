"""Equalized models predict the same, and their activations survive rounding better."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import trtllm_lite.exporter.calibration.equalize as equalize_module
from trtllm_lite.exporter.calibration.costs import row_costs
from trtllm_lite.exporter.calibration.equalize import equalize
from trtllm_lite.exporter.calibration.rounding_trial import Rounding, RoundingTrial
from trtllm_lite.exporter.calibration.statistics import collect
from trtllm_lite.exporter.families import BASE, PROVED, tiny_config
from trtllm_lite.runtime.progress import NoProgress

# The norms that take part, by family: those whose output goes to linear modules and nowhere else.
ROLES = {
    "Llama 3": {"input_layernorm", "post_attention_layernorm"},
    "Qwen2": {"input_layernorm", "post_attention_layernorm"},
    "Gemma 2": {"input_layernorm", "pre_feedforward_layernorm"},
    "Command-R": {"input_layernorm"},
    "Starcoder2": {"input_layernorm", "post_attention_layernorm"},
    "OLMo 2": set(),
}

ROWS = Rounding(bits=8, block=None, limit=0.025)


def loud_model(name: str) -> Any:
    """A tiny model of the family; every norm has one feature that is 64 times as large."""
    torch.manual_seed(0)
    config = tiny_config(next(f for f in PROVED if f.name == name))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in key and key.endswith("weight"):
                parameter.add_(torch.randn(len(parameter)) * 0.1)
                parameter[len(parameter) // 3] = 64.0
            elif parameter.ndim == 1:
                parameter.copy_(torch.randn(len(parameter)))
    return model


def text() -> Any:
    return np.random.default_rng(1).integers(0, BASE["vocab_size"], (8, 24))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model(input_ids=torch.from_numpy(text())).logits
    return made


@pytest.mark.parametrize("name", ROLES)
def test_predictions_are_the_same_and_norms_take_part(name: str) -> None:
    model = loud_model(name)
    before = logits(model)
    scalings = equalize(model, text(), NoProgress())
    assert torch.allclose(logits(model), before, rtol=0, atol=1e-4 * float(before.abs().max()))
    norms = {key for key in scalings if "norm" in key and key.endswith(".weight")}
    assert {key.split(".")[-2] for key in norms} == ROLES[name]
    assert len(norms) == len(ROLES[name]) * model.config.num_hidden_layers


@pytest.mark.parametrize("name", ROLES)
def test_the_scalings_make_the_new_parameters_of_the_old_ones(name: str) -> None:
    model = loud_model(name)
    old = {key: p.detach().clone() for key, p in model.named_parameters()}
    scalings = equalize(model, text(), NoProgress())
    for key, parameter in model.named_parameters():
        want = old[key].numpy()
        if key in scalings:
            made = scalings[key].applied([want.reshape(-1)], want.shape)
            want = next(made).reshape(want.shape)
        assert np.array_equal(parameter.detach().numpy(), want)


def test_without_shift_not_a_bit_of_the_predictions_changes() -> None:
    model = loud_model("Llama 3")
    before = logits(model)
    scalings = equalize(model, text(), NoProgress())
    factors = [f for s in scalings.values() for f in (s.rows, s.columns) if f is not None]
    assert any((f != 1).any() for f in factors)
    assert all((np.frexp(f)[0] == 0.5).all() for f in factors)
    assert torch.equal(logits(model), before)


def test_rounded_activations_cost_less() -> None:
    model = loud_model("Llama 3")
    evened = copy.deepcopy(model)
    equalize(evened, text(), NoProgress())
    before, after = (
        row_costs(m, collect(m, text(), NoProgress(), with_moments=False)) for m in (model, evened)
    )
    loud = [n for n in before if "o_proj" not in n and "down_proj" not in n]
    assert sum(after[n] for n in loud) < 0.3 * sum(before[n] for n in loud)


def test_a_norm_with_another_reader_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is added to the residual stream as well: only trying it can tell."""
    model = loud_model("Llama 3")
    mlp = type(model.model.layers[0].mlp)
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: plain(self, x) + x)
    before = logits(model)
    kept = {key: p.detach().clone() for key, p in model.named_parameters()}
    scalings = equalize(model, text(), NoProgress())
    assert torch.equal(logits(model), before)
    assert {key.split(".")[-2] for key in scalings if "norm" in key} == {"input_layernorm"}
    untouched = [key for key in kept if "post_attention_layernorm" in key or "gate_proj" in key]
    assert all(torch.equal(kept[key], model.get_parameter(key)) for key in untouched)


@pytest.mark.parametrize(
    ("name", "makers"),
    [
        ("Llama 3", {"v_proj", "up_proj"}),
        ("Qwen2", {"v_proj", "up_proj"}),
        ("Gemma 2", {"v_proj", "up_proj"}),
        ("Qwen3", {"v_proj", "up_proj"}),
        ("Starcoder2", {"v_proj"}),
    ],
)
def test_projections_that_stay_linear_make_features_too(name: str, makers: set[str]) -> None:
    """Values with one head for several of the queries, and gated layers; no layer with a bend."""
    model = loud_model(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "v_proj.weight" in key or "up_proj.weight" in key or "c_fc.weight" in key:
                parameter[3] *= 1024
    before = logits(model)
    scalings = equalize(model, text(), NoProgress())
    assert torch.allclose(logits(model), before, rtol=0, atol=1e-4 * float(before.abs().max()))
    divided = {
        key.split(".")[-2]: s.rows
        for key, s in scalings.items()
        if "norm" not in key and key.endswith("weight") and s.rows is not None
    }
    assert set(divided) == makers
    for rows in divided.values():
        assert rows is not None
        assert rows[3] == rows.min()


def test_a_change_that_rounding_does_not_like_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Factors that make one feature of each norm huge instead of small: predictions stay, rounded
    ones do not."""
    model = loud_model("Llama 3")
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    plain = equalize_module._factors

    def wrong(*args: Any) -> tuple[Any, Any]:
        factors, spread = plain(*args)
        return 1 / factors, 1 / spread

    monkeypatch.setattr(equalize_module, "_factors", wrong)
    assert equalize(copy.deepcopy(model), text(), NoProgress())
    assert equalize(model, text(), NoProgress(), (ROWS,)) == {}
    assert all(torch.equal(before[key], p) for key, p in model.named_parameters())


@pytest.mark.parametrize("rounding", [ROWS, Rounding(8, 32, 0.01), Rounding(4, 32, 0.05)])
def test_what_is_kept_lowers_the_cost_of_the_rounding(rounding: Rounding) -> None:
    model = loud_model("Llama 3")
    evened = copy.deepcopy(model)
    assert equalize(evened, text(), NoProgress(), (rounding,))
    costs = [RoundingTrial(m, text(), (rounding,)).loss() for m in (model, evened)]
    assert costs[1] < costs[0]
