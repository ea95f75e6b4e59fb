"""Longrope, row by row: each row gets what transformers gives it alone."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trtllm_lite.exporter.families import BASE, ORIGINAL, PROVED, tiny_config
from trtllm_lite.models.longrope import LongRope, fixed, graft_longrope, set_context_lens

LENGTHS = [1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, ORIGINAL + 20, 100]
LONGROPE = [f for f in PROVED if f.model_type == "phi3"]


def model_of(family: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        tiny_config(family), attn_implementation="eager", dtype=torch.float32
    ).eval()


@pytest.fixture(params=LONGROPE, ids=lambda f: f.key)
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


def rotary(model: Any) -> Any:
    return model.model.rotary_emb


def positions(length: int) -> torch.Tensor:
    return torch.arange(length)[None]


def alone(model: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own cos and sin of one row of that length, from a module of its own."""
    module = copy.deepcopy(rotary(model))
    cos, sin = module(torch.zeros(1), positions(length))
    return cos[0], sin[0]


def test_rows_on_both_sides_of_the_switch_in_one_batch(model: Any) -> None:
    wanted = [alone(model, length) for length in LENGTHS]
    assert graft_longrope(model, 128) == ORIGINAL
    assert isinstance(rotary(model), LongRope)
    set_context_lens(model, torch.tensor(LENGTHS, dtype=torch.int32))
    width = max(LENGTHS)
    cos, sin = rotary(model)(torch.zeros(1), positions(width).expand(len(LENGTHS), -1))
    for row, length in enumerate(LENGTHS):
        assert torch.equal(cos[row, :length], wanted[row][0]), length
        assert torch.equal(sin[row, :length], wanted[row][1]), length


def test_the_two_sides_differ(model: Any) -> None:
    """Or the test above would prove nothing."""
    short, long = alone(model, ORIGINAL)[0], alone(model, ORIGINAL + 1)[0]
    assert not torch.allclose(short[5:], long[5:ORIGINAL])


def test_the_choice_follows_the_length_not_the_positions(model: Any) -> None:
    """All chunks of a prompt use the frequencies of the whole prompt."""
    want = alone(model, 100)[0]
    graft_longrope(model, 128)
    set_context_lens(model, torch.tensor([100], dtype=torch.int32))
    for start in range(0, 100, 10):
        cos, _ = rotary(model)(torch.zeros(1), positions(100)[:, start : start + 10])
        assert torch.equal(cos[0], want[start : start + 10])


def test_a_forward_without_lengths_is_a_mistake_that_is_seen(model: Any) -> None:
    graft_longrope(model, 128)
    with pytest.raises(AssertionError):
        rotary(model)(torch.zeros(1), positions(3))


def test_fixed_keeps_its_frequencies(model: Any) -> None:
    """transformers' module changes its frequencies when a long row passes, and back."""
    still = fixed(rotary(model))
    before = still.inv_freq.clone()
    want = alone(model, ORIGINAL)[0]
    cos, _ = still(torch.zeros(1), positions(100))
    assert torch.equal(still.inv_freq, before)
    assert torch.equal(cos[0, :ORIGINAL], want)
    assert rotary(model).rope_type == "longrope", "the original is left alone"


@pytest.mark.parametrize("max_model_len", [1, ORIGINAL - 1, ORIGINAL])
def test_within_the_original_context_there_is_no_switch(model: Any, max_model_len: int) -> None:
    want = alone(model, max_model_len)
    assert graft_longrope(model, max_model_len) is None
    assert not isinstance(rotary(model), LongRope)
    set_context_lens(model, None)
    cos, sin = rotary(model)(torch.zeros(1), positions(max_model_len))
    assert torch.equal(cos[0], want[0])
    assert torch.equal(sin[0], want[1])


def test_one_token_more_has_a_switch(model: Any) -> None:
    assert graft_longrope(model, ORIGINAL + 1) == ORIGINAL


def test_other_models_are_left_alone() -> None:
    config = AutoConfig.for_model("llama", **BASE)
    llama = AutoModelForCausalLM.from_config(config)
    before = rotary(llama)
    assert graft_longrope(llama, 128) is None
    assert rotary(llama) is before
    set_context_lens(llama, torch.tensor([3], dtype=torch.int32))
