"""The model that a session is held against: transformers' eager one, in float32 on the CPU."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.backends.base import KVBlock
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.tools.doctor_checks.drive import Logits


class EagerReference:
    """`ReferenceModel` of a checkpoint folder, its weights rounded to `dtype` first. Needs the
    packages of the export."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        from trtllm_lite.exporter.checkpoint import open_checkpoint
        from trtllm_lite.exporter.reference import load_reference

        opened = open_checkpoint(str(checkpoint), None, NoProgress())
        self._reference = load_reference(opened, dtype)

    def logits(self, row: Sequence[int]) -> Logits:
        return self._reference.logits(list(row), len(row))

    def keys_values(self, row: Sequence[int]) -> KVBlock:
        import torch
        from transformers import DynamicCache

        model = self._reference.model
        cache = DynamicCache(config=model.config)
        # The name of the argument changed within the versions that the export takes.
        named = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        with torch.no_grad():
            model(input_ids=torch.tensor([list(row)]), use_cache=True, **{named: cache})
        return KVBlock(
            tuple(_numpy(layer.keys) for layer in cache.layers),
            tuple(_numpy(layer.values) for layer in cache.layers),
        )


def _numpy(tensor: Any) -> Any:
    """[1, kv_heads, tokens, head_dim] as [kv_heads, tokens, head_dim]."""
    return tensor[0].float().numpy()
