"""Longrope (Phi-3, Phi-4-mini): two sets of rotary frequencies, chosen by the sequence's length.

transformers picks one set for the whole batch from the largest position. Here the choice is made
row by row, from the tokens that the row will hold when its present prefill is done, so that a row
does not depend on its neighbours and all chunks of one prompt use the same set.
Source: LongRoPE, arXiv:2402.13753; transformers, modeling_rope_utils.longrope_frequency_update.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Tensor = torch.Tensor


class LongRope(nn.Module):
    """A rotary module of each set. `context_lens` [batch] int32 is set for each forward."""

    def __init__(self, rotary: Any, switch_at: int) -> None:
        super().__init__()
        self.switch_at = switch_at
        self.short = fixed(rotary)
        self.long = fixed(rotary)
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, None, seq_len=switch_at + 1)
        self.long.inv_freq = frequencies
        self.context_lens: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        assert self.context_lens is not None
        beyond = (self.context_lens > self.switch_at)[:, None, None]
        short_cos, short_sin = self.short(x, position_ids)
        long_cos, long_sin = self.long(x, position_ids)
        return torch.where(beyond, long_cos, short_cos), torch.where(beyond, long_sin, short_sin)


def fixed(rotary: Any) -> Any:
    """A copy that keeps its present frequencies for good."""
    still = copy.deepcopy(rotary)
    still.rope_type = "default"
    return still


def graft_longrope(model: nn.Module, max_model_len: int) -> int | None:
    """Replace every longrope rotary module. Returns the length after which a sequence has to be
    computed again, or None when no sequence gets that long or the model has no longrope."""
    switch_at = None
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            rotary: Any = child
            if getattr(rotary, "rope_type", None) != "longrope":
                continue
            limit = int(rotary.config.rope_parameters["original_max_position_embeddings"])
            within = max_model_len <= limit
            setattr(parent, name, fixed(rotary) if within else LongRope(rotary, limit))
            switch_at = None if within else limit
    return switch_at


def set_context_lens(model: nn.Module, context_lens: Tensor | None) -> None:
    """Tell every LongRope of the model how long the rows of the next forward will be."""
    for module in model.modules():
        if isinstance(module, LongRope):
            module.context_lens = context_lens
