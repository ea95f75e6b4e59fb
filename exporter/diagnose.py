"""After a failed gate: which layer's output is the first to depart from the reference."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort

from trtllm_lite.exporter.passes import SKIP, SUM, scopes
from trtllm_lite.exporter.reference import LAYER, Reference
from trtllm_lite.exporter.rounded.graph import in_float32
from trtllm_lite.exporter.rounded.session import EXTERNAL_FOLDER, KINDS
from trtllm_lite.runtime.bundle import Bundle

Array = npt.NDArray[Any]
# Far above the noise of float32 sums in another order, far below any real mistake.
DEPARTS = 1e-3
# The same for half precision.
HALF_DEPARTS = 0.05
# The same for quantized weights, whose noise grows from layer to layer.
QUANTIZED_DEPARTS = 0.3
MAX_TOKENS = 256


def first_departure(
    bundle: Bundle, reference: Reference, token_ids: list[int], departs: float = DEPARTS
) -> str:
    """One clause for the failure message: the first layer that is further off than `departs` and
    by how much, relative to the size of its hidden state."""
    ids = token_ids[:MAX_TOKENS]
    ours = hidden_states(bundle, ids)
    theirs = reference.layer_outputs(ids)
    if not ours or len(ours) != len(theirs):
        return "its layers cannot be told apart, so the first to depart is not known"
    for layer, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        by = _relative(got, want)
        if not by <= departs:
            return f"the first layer to depart is {layer}, by {by:.2g} of its hidden state's size"
    return "no layer departs: look at the final norm and the output layer"


def hidden_states(bundle: Bundle, token_ids: list[int]) -> list[Array]:
    """Output of each layer for a fresh prefill of the tokens: [seq, hidden] each."""
    model = ir.load(bundle.graph_path("prefill"))
    kind = KINDS.get(bundle.manifest.kv.dtype)
    if kind is not None:
        model = in_float32(model, kind, rounded=True)
    outputs = layer_outputs(model)
    for value in outputs:
        model.graph.outputs.append(value)
    session = _session(ir.to_proto(model), bundle.folder)
    names = [str(v.name) for v in outputs]
    found = session.run(names, _feeds(bundle, token_ids))
    return [out[0].astype(np.float32) for out in found]


def layer_outputs(model: ir.Model) -> list[ir.Value]:
    """The value that leaves each layer: made inside it, read outside of it. The tracer left the
    module names on every node, and lowering keeps them."""
    found: dict[int, ir.Value] = {}
    for node in model.graph:
        layer = _layer(node)
        if layer is None:
            continue
        for value in node.outputs:
            readers = [use.node for use in value.uses()]
            if any(_layer(reader) != layer for reader in readers) and _is_hidden(value):
                found[layer] = _hidden_state(node, value)
    return [found[i] for i in sorted(found)]


def _hidden_state(node: ir.Node, value: ir.Value) -> ir.Value:
    """The sum, where the norm of the next layer is made by the node that ends this one."""
    if node.op_type not in SKIP.values():
        return value
    if len(node.outputs) <= SUM:
        node.resize_outputs(SUM + 1)
        for unread in node.outputs[1:SUM]:
            unread.name = ""
    total = node.outputs[SUM]
    total.name = total.name or f"{value.name}.sum"
    total.type = value.type
    return total


def _layer(node: ir.Node) -> int | None:
    for scope in scopes(node):
        if match := LAYER.search(scope):
            return int(match.group(1))
    return None


def _is_hidden(value: ir.Value) -> bool:
    return value.shape is None or len(value.shape) == 3


def _session(proto: onnx.ModelProto, folder: Path) -> ort.InferenceSession:
    """Opened from memory: the bundle may not be ours to write in."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(EXTERNAL_FOLDER, str(folder))
    return ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _feeds(bundle: Bundle, token_ids: list[int]) -> dict[str, Array]:
    count = len(token_ids)
    by_role: dict[str, Array] = {
        "input_ids": np.asarray([token_ids], np.int64),
        "past_lens": np.zeros(1, np.int32),
        "query_lens": np.array([count], np.int32),
        "context_lens": np.array([count], np.int32),
        "max_total_len": np.array([count], np.int32),
        "logits_indices": np.arange(count)[None],
    }
    feeds = {}
    for spec in bundle.manifest.graph("prefill").inputs:
        if spec.role in by_role:
            feeds[spec.name] = by_role[spec.role]
        else:
            shape = 1, int(spec.shape[1]), count, int(spec.shape[3])
            feeds[spec.name] = np.zeros(shape, np.float32)
    return feeds


def _relative(got: Array, want: Array) -> float:
    return float(np.abs(got - want).max() / max(1e-9, float(np.abs(want).max())))
