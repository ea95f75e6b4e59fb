"""The reference: transformers' own eager model in float32."""

import copy
import inspect
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoModelForCausalLM

from trtllm_lite.exporter.checkpoint import Checkpoint
from trtllm_lite.exporter.gguf import silent_loading
from trtllm_lite.exporter.graphs import truncated
from trtllm_lite.runtime.errors import CheckpointError

Array = npt.NDArray[Any]
# The name of a decoder layer's module, in every family of transformers that is known here.
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)$")
STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Reference:
    """Eager attention, float32, one sequence at a time, no cache. Weights are rounded to the
    bundle's storage dtype first, so that what is compared is the conversion alone."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def model(self) -> Any:
        return self._model

    def logits(self, token_ids: list[int], last: int) -> Array:
        """Logits of the last `last` positions, [last, vocab] float32."""
        keep = {"logits_to_keep": last} if self._keeps else {}
        with torch.no_grad():
            out = self._model(input_ids=torch.tensor([token_ids]), use_cache=False, **keep)
        logits: Array = out.logits[0, -last:].to(torch.float32).numpy()
        return logits

    def layer_outputs(self, token_ids: list[int]) -> list[Array]:
        """What leaves each layer: [seq, hidden] each. transformers' own `hidden_states` has the
        last layer only after the final norm."""
        seen: list[Array] = []

        def keep(module: Any, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            seen.append(first[0].to(torch.float32).numpy())

        layers = [m for name, m in self._model.named_modules() if LAYER.search(name)]
        handles = [layer.register_forward_hook(keep) for layer in layers]
        try:
            self.logits(token_ids, 1)
        finally:
            for handle in handles:
                handle.remove()
        return seen


def load_reference(checkpoint: Checkpoint, dtype: str, num_layers: int | None = None) -> Reference:
    """Load the checkpoint as transformers does. Raises CheckpointError when it cannot."""
    transformers.utils.logging.disable_progress_bar()
    config = truncated(copy.deepcopy(checkpoint.config), num_layers)
    try:
        with silent_loading():
            model = AutoModelForCausalLM.from_pretrained(
                **checkpoint.load_arguments,
                config=config,
                dtype=torch.float32,
                attn_implementation="eager",
            )
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot load the reference: {first}") from error
    if dtype in STORED:
        _round(model, STORED[dtype])
    return Reference(model)


def _round(model: Any, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.to(dtype).to(torch.float32))


def needed_bytes(num_parameters: int, num_graphs: int = 2) -> int:
    """Memory to hold the reference and the bundle's session side by side: the model, one packed
    copy of the weights for each of the graphs, all float32, and room to work. Pages of the
    weights file are not counted: the system can take them back."""
    return num_parameters * (4 + 4 * num_graphs + 1) + 2**30


def relative_kl(reference: Array, other: Array) -> float:
    """KL(reference || other) of one row of logits, in nats."""
    with np.errstate(invalid="ignore"):
        p, q = _log_softmax(reference), _log_softmax(other)
        return float(np.sum(np.exp(p) * (p - q)))


def _log_softmax(row: Array) -> Array:
    wide = row.astype(np.float64)
    shifted = wide - wide.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result
