"""Prompts through a float32 graph on ONNX Runtime's CPU provider, by the graph's table."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from trtllm_lite.runtime.manifest import GraphSpec, KVSpec

Array = npt.NDArray[Any]
Results = dict[str, Array]
EDGE = 32
"""Of so many tokens at either end of a prompt the logits are computed."""


class GraphRun:
    """A graph beside its weights, run as it stands: nothing is fused or taken out. Everything of
    the table that was float16 is float32. Logits are those of the first and the last tokens: of
    what is computed for the wanted tokens alone, the largest values are at the first."""

    def __init__(self, model: ir.Model, spec: GraphSpec, kv: KVSpec, folder: Path) -> None:
        path = folder / f"scout-{spec.file}"
        self._spec, self._kv = spec, kv
        try:
            ir.save(model, path)
            options = ort.SessionOptions()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = 3
            # In the order of the file, and with memory given back: a weight in float32 is gone
            # when its product is made.
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
            options.enable_cpu_mem_arena = options.enable_mem_pattern = False
            self._session = ort.InferenceSession(path, options, ["CPUExecutionProvider"])
        finally:
            path.unlink(missing_ok=True)

    def prompt(self, tokens: Sequence[int]) -> Iterator[Results]:
        """All outputs, by name: of one run, or where the graph takes one token a row, of a run for
        each token."""
        caches = self._empty(len(tokens))
        if self._spec.is_multi_token:
            yield self._run(tokens, 0, caches)
            return
        for past, token in enumerate(tokens):
            results = self._run([token], past, caches)
            yield results
            caches = {
                given.name: results[made.name]
                for given, made in zip(self._caches("past"), self._caches("present"), strict=True)
            }

    def _run(self, tokens: Sequence[int], past: int, caches: Mapping[str, Array]) -> Results:
        count = len(tokens)
        by_role: dict[str, Array] = {
            "input_ids": np.array([tokens], np.int64),
            "past_lens": np.array([past], np.int32),
            "query_lens": np.array([count], np.int32),
            "context_lens": np.array([past + count], np.int32),
            "max_total_len": np.array([past + count], np.int32),
            "logits_indices": _wanted(count),
        }
        feeds = dict(caches)
        for tensor in self._spec.inputs:
            if tensor.role in by_role:
                feeds[tensor.name] = by_role[tensor.role]
        names = [output.name for output in self._session.get_outputs()]
        found: list[Array] = self._session.run(names, feeds)
        return dict(zip(names, found, strict=True))

    def _empty(self, capacity: int) -> dict[str, Array]:
        """Caches of zeros, float32 [1, kv_heads, capacity, head_dim]."""
        made = {}
        for tensor in self._caches("past"):
            assert tensor.layer is not None
            layer = self._kv.layers[tensor.layer]
            shape = (1, layer.num_kv_heads, capacity, layer.head_dim)
            made[tensor.name] = np.zeros(shape, np.float32)
        return made

    def _caches(self, which: str) -> list[Any]:
        tensors = self._spec.inputs if which == "past" else self._spec.outputs
        found = [t for t in tensors if t.role in (f"{which}_key", f"{which}_value")]
        return sorted(found, key=lambda t: (t.layer, t.role))


def _wanted(count: int) -> Array:
    """int64 [1, n], rising."""
    tokens = np.arange(count, dtype=np.int64)
    return tokens[(tokens < EDGE) | (tokens >= count - EDGE)][None]
