"""Layers that keep their weight [in, out], seen as linear layers, which keep it [out, in]."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from trtllm_lite.exporter.calibration.scaling import Scaling


def turn_conv1d(model: Any) -> frozenset[str]:
    """Put a linear module with the same output in the place of every Conv1D (GPT-2), one by one.

    Returns the names of their weights, which are [out, in] now, as in the graphs.
    """
    turned = set()
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                setattr(parent, name, _linear(child))
                turned.add(".".join(part for part in (parent_name, name, "weight") if part))
    return frozenset(turned)


def turned_back(scalings: Mapping[str, Scaling], turned: Iterable[str]) -> dict[str, Scaling]:
    """Scalings of a model's parameters, those of turned weights as the checkpoint keeps them."""
    names = set(turned)
    return {
        name: replace(s, rows=s.columns, columns=s.rows) if name in names else s
        for name, s in scalings.items()
    }


def _linear(conv: Conv1D) -> torch.nn.Linear:
    inputs, outputs = conv.weight.shape
    linear = torch.nn.Linear(inputs, outputs, device="meta")
    weight = conv.weight.detach().t().contiguous()
    linear.weight = torch.nn.Parameter(weight, requires_grad=conv.weight.requires_grad)
    linear.bias = conv.bias
    return linear
