"""The statistics against slow sums, and what they promise: the divergence that a change causes."""

from typing import Any

import pytest
import torch

from trtllm_lite.exporter.calibration.statistics import (
    LEVELS,
    Statistics,
    collect,
    layer_linears,
    moment_bytes,
    rounded_per_token,
)
from trtllm_lite.runtime.progress import NoProgress

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def logp(model: Any, windows: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.from_numpy(windows)).logits.double(), -1)


def seen_inputs(model: Any, windows: Any, module: Any) -> torch.Tensor:
    """What one module was given, [tokens, K] float64."""
    seen: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    logp(model, windows)
    handle.remove()
    return seen[0].flatten(0, 1).double()


def test_every_projection_of_every_layer_and_no_other(
    tiny_model: Any, statistics: Statistics
) -> None:
    names = {n for n, _ in tiny_model.named_parameters() if n.split(".")[-2] in PROJECTIONS}
    assert set(statistics) == names
    assert {f"{n}.weight" for n in layer_linears(tiny_model)} == names


def test_sums_are_of_what_the_module_was_given(
    tiny_model: Any, windows: Any, statistics: Statistics
) -> None:
    for name, module in layer_linears(tiny_model).items():
        x = seen_inputs(tiny_model, windows, module)
        got = statistics[f"{name}.weight"].inputs
        assert got.tokens == len(x) == windows.size
        assert got.moment is not None
        tolerance = 1e-4 * float(x.square().mean())
        assert torch.allclose(got.moment.double(), x.T @ x / len(x), atol=tolerance)
        assert torch.allclose(got.power.double(), x.square().mean(0), atol=tolerance)
        scale = x.abs().amax(1, keepdim=True) / LEVELS
        rounding = (x - (x / scale).round() * scale).square().mean(0)
        assert torch.allclose(got.rounding.double(), rounding, rtol=0.05, atol=1e-9)


def test_modules_that_read_the_same_tensor_share_their_inputs(statistics: Statistics) -> None:
    shared: dict[int, set[str]] = {}
    for name, known in statistics.items():
        if ".layers.1." in name:
            shared.setdefault(id(known.inputs), set()).add(name.split(".")[-2])
    groups = sorted(sorted(names) for names in shared.values())
    attention, mlp = ["k_proj", "q_proj", "v_proj"], ["gate_proj", "up_proj"]
    assert groups == [["down_proj"], mlp, attention, ["o_proj"]]


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_the_divergence_of_a_small_change_is_foreseen(
    tiny_model: Any, windows: Any, statistics: Statistics, projection: str
) -> None:
    before = logp(tiny_model, windows)
    for layer in (0, 1):
        name = next(n for n in statistics if f"layers.{layer}." in n and projection in n)
        known, parameter = statistics[name], tiny_model.get_parameter(name)
        kept = parameter.detach().clone()
        noise = torch.randn(kept.shape, generator=torch.Generator().manual_seed(layer))
        change = noise * 0.02 * kept.std()
        assert known.inputs.moment is not None
        foreseen = float(known.fisher @ ((change @ known.inputs.moment) * change).sum(1)) / 2
        parameter.data.add_(change)
        after = logp(tiny_model, windows)
        parameter.data.copy_(kept)
        measured = float((before.exp() * (before - after)).sum(-1).mean())
        assert measured / 2.5 < foreseen < measured * 2.5


def test_without_moments_only_their_diagonals_are_kept(
    tiny_model: Any, windows: Any, statistics: Statistics
) -> None:
    small = collect(tiny_model, windows, NoProgress(), with_moments=False)
    assert set(small) == set(statistics)
    for name, known in small.items():
        assert known.inputs.moment is None
        assert torch.equal(known.inputs.power, statistics[name].inputs.power)
        assert torch.equal(known.fisher, statistics[name].fisher)


def test_nothing_is_left_on_the_model(tiny_model: Any, statistics: Statistics) -> None:
    assert statistics
    assert not any(m._forward_hooks for m in tiny_model.modules())
    assert not any(p.requires_grad or p.grad is not None for p in tiny_model.parameters())


def test_the_memory_of_the_moments_is_an_upper_bound(
    tiny_model: Any, statistics: Statistics
) -> None:
    moments = {id(s.inputs): s.inputs.moment for s in statistics.values()}
    needed = sum(m.nbytes for m in moments.values() if m is not None)
    assert needed <= moment_bytes(tiny_model) <= 3 * needed


def test_a_token_of_zeros_is_rounded_to_zeros() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 0.001]])
    assert rounded_per_token(x).tolist() == [[0.0, 0.0], [1.0, 0.0]]
