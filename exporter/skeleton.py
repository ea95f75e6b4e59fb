"""A transformers model without weights: fake parameters, real buffers.

Parameters are FakeTensors, so a model of any size costs a few megabytes. Buffers (rope
frequencies, position offsets) are small, come from no checkpoint and keep their real values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights


@dataclass(frozen=True)
class Skeleton:
    """`model` in eval mode, float32; `aliases` maps every name that a checkpoint may hold to the
    one name under which its tensor is kept (tied parameters have several); `shapes` are of those
    names, before anything is grafted."""

    model: Any
    fake_mode: FakeTensorMode
    aliases: dict[str, str]
    shapes: dict[str, tuple[int, ...]]


def build_skeleton(config: Any, attn_implementation: str) -> Skeleton:
    """Make the model of `config` with no weight in memory."""
    with _meta_parameters(), no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=torch.float32
        ).eval()
        model.tie_weights()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    aliases = _fake_parameters(model, mode)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return Skeleton(model, mode, aliases, shapes)


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Parameters registered inside are moved to the meta device at once; tied ones stay tied."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        original(self, name, param)

    with mock.patch.object(nn.Module, "register_parameter", register):
        yield


def _fake_parameters(model: nn.Module, mode: FakeTensorMode) -> dict[str, str]:
    """Replace meta parameters by fake CPU ones; returns every name -> first name of its tensor."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    aliases: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            if id(param) not in first:
                with mode:
                    fake = torch.empty(param.shape, dtype=param.dtype)
                    # The original stays referenced, so that its id is not reused.
                    first[id(param)] = (full, nn.Parameter(fake, requires_grad=False))
                    first[id(first[id(param)][1])] = first[id(param)]
            aliases[full] = first[id(param)][0]
            module._parameters[name] = first[id(param)][1]
    # Persistent buffers come from the checkpoint as well.
    return {name: aliases.get(name, name) for name in model.state_dict()}
