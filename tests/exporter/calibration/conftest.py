"""A tiny model, a text for it, and what calibration gathers of both."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trtllm_lite.exporter.calibration.statistics import Statistics, collect
from trtllm_lite.exporter.families import BASE
from trtllm_lite.runtime.progress import NoProgress


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    """A Llama of two layers in float32 whose predictions are neither flat nor certain."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **BASE, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[1] ** -0.5)
            if "embed_tokens" in name:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="session")
def windows() -> Any:
    return np.random.default_rng(0).integers(0, BASE["vocab_size"], (12, 32))


@pytest.fixture(scope="session")
def statistics(tiny_model: Any, windows: Any) -> Statistics:
    return collect(tiny_model, windows, NoProgress())
