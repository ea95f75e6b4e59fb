"""The native graph over a cache of another element type.

The kernels compute in float32 whatever they keep. ONNX Runtime's own GroupQueryAttention has no
float16 cache beside float32 queries, so the graphs over its operators keep a float32 one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trtllm_lite.exporter.native.lower import NativeGraph
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.kv_dtype import KVDtype

Array = npt.NDArray[Any]

AUTO = "auto"
ATTENTION = "Attention"
TYPES: dict[KVDtype, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "int8": ir.DataType.INT8,
}
OPERATORS: dict[KVDtype, str] = {
    "float32": ATTENTION,
    "float16": "AttentionFloat16",
    "int8": "AttentionInt8",
}
# Where the operators have the caches, and the steps of an int8 cache.
PAST, PRESENT, SCALES = (3, 4), (1, 2), (12, 13)


@dataclass(frozen=True, eq=False)
class CacheScales:
    """What one step of an int8 cache stands for: of every layer, float32 [kv_heads * head_dim] for
    K (as it is kept: rotated) and for V."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


def cache_dtypes(asked: str, native: NativeGraph | None) -> tuple[KVDtype, ...]:
    """The types of cache that a bundle brings native graphs for, first the one it is made for.

    asked: of `--kv-dtype`; "auto" is float16 where all attention is our kernels'. A float32 cache
    is always among them. Raises UsageError where a type cannot be had.
    """
    known: list[KVDtype] = [kind for kind in TYPES if kind == asked]
    if asked == AUTO and native is not None and not _why_not(native):
        known = ["float16"]
    reason = "" if not known or known[0] == "float32" else _why_not(native)
    if reason:
        raise UsageError(f"--kv-dtype: got {asked!r}; {reason}; allowed: auto, float32")
    return tuple(dict.fromkeys((*known, "float32")))


def _why_not(native: NativeGraph | None) -> str:
    """Empty when the graph can have another cache than float32."""
    if native is None:
        return "it needs the native kernels, which run quantized weights"
    operators = [node.op_type for node in native.model.graph]
    left = operators.count("GroupQueryAttention")
    if left or ATTENTION not in operators:
        total = left + operators.count(ATTENTION)
        return f"{left} of {total} layers have attention that the native kernels have not"
    return ""


def with_cache(model: ir.Model, kind: KVDtype, scales: CacheScales | None) -> ir.Model:
    """A copy of a native graph whose cache is of that type. `scales` are for int8 alone."""
    made = model.clone()
    nodes = {node.inputs[PAST[0]]: node for node in made.graph if node.op_type == ATTENTION}
    for layer, past in enumerate(v for v in made.graph.inputs if v in nodes):
        node = nodes[past]
        caches = [node.inputs[i] for i in PAST] + [node.outputs[i] for i in PRESENT]
        for value in caches:
            assert value is not None
            value.type = ir.TensorType(TYPES[kind])
        node.op_type = OPERATORS[kind]
        if kind == "int8":
            assert scales is not None
            steps = (scales.keys[layer], scales.values[layer])
            _give_scales(made.graph, node, f"kv.{layer}", steps)
    return made


def _give_scales(graph: ir.Graph, node: ir.Node, name: str, steps: Sequence[Array]) -> None:
    for at, part, step in zip(SCALES, ("k_scale", "v_scale"), steps, strict=True):
        tensor = ir.tensor(step.astype(np.float32), name=f"{name}.{part}")
        value = ir.Value(
            name=tensor.name,
            shape=ir.Shape(step.shape),
            type=ir.TensorType(ir.DataType.FLOAT),
            const_value=tensor,
        )
        graph.register_initializer(value)
        node.replace_input_with(at, value)
