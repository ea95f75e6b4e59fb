"""After a failed gate: which layer's output is the first to depart from the reference."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort

from trtllm_lite.exporter.passes import scopes
from trtllm_lite.exporter.reference import Reference
from trtllm_lite.runtime.bundle import Bundle

Array = npt.NDArray[Any]
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)$")
# Far above the noise of float32 sums in another order, far below any real mistake.
DEPARTS = 1e-3
MAX_TOKENS = 256


def first_departure(bundle: Bundle, reference: Reference, token_ids: list[int]) -> str:
    """One clause for the failure message: the first layer and by how much, relative to the size of
    its hidden state."""
    ids = token_ids[:MAX_TOKENS]
    ours = hidden_states(bundle, ids)
    theirs = reference.hidden_states(ids)
    # The reference's last entry is after the final norm, so the last layer has no counterpart.
    for layer, (got, want) in enumerate(zip(ours, theirs[1:-1], strict=False)):
        by = _relative(got, want)
        if not by <= DEPARTS:
            return f"the first layer to depart is {layer}, by {by:.2g} of its hidden state's size"
    last = len(ours) - 1
    return (
        f"no layer before {last} departs: look at layer {last}, the final norm and the output layer"
    )


def hidden_states(bundle: Bundle, token_ids: list[int]) -> list[Array]:
    """Output of each layer for a fresh prefill of the tokens: [seq, hidden] each."""
    model = ir.load(bundle.graph_path("prefill"))
    outputs = layer_outputs(model)
    for value in outputs:
        model.graph.outputs.append(value)
    proto = ir.to_proto(model)
    folder = Path(bundle.folder)
    session = _session(proto, folder)
    names = [str(v.name) for v in outputs]
    return [out[0] for out in session.run(names, _feeds(bundle, token_ids))]


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
                found[layer] = value
    return [found[i] for i in sorted(found)]


def _layer(node: ir.Node) -> int | None:
    for scope in scopes(node):
        if match := LAYER.search(scope):
            return int(match.group(1))
    return None


def _is_hidden(value: ir.Value) -> bool:
    return value.shape is None or len(value.shape) == 3


def _session(proto: onnx.ModelProto, folder: Path) -> ort.InferenceSession:
    """ONNX Runtime resolves external data beside the model's path, so the copy stands there."""
    path = folder / ".diagnose.onnx"
    try:
        path.write_bytes(proto.SerializeToString())
        options = ort.SessionOptions()
        options.log_severity_level = 3
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    finally:
        path.unlink(missing_ok=True)


def _feeds(bundle: Bundle, token_ids: list[int]) -> dict[str, Array]:
    count = len(token_ids)
    by_role: dict[str, Array] = {
        "input_ids": np.asarray([token_ids], np.int64),
        "past_lens": np.zeros(1, np.int32),
        "query_lens": np.array([count], np.int32),
        "context_lens": np.array([count], np.int32),
        "logits_indices": np.array([[count - 1]], np.int64),
    }
    feeds = {}
    for spec in bundle.manifest.graph("prefill").inputs:
        if spec.role in by_role:
            feeds[spec.name] = by_role[spec.role]
        else:
            feeds[spec.name] = np.zeros(
                (1, int(spec.shape[1]), count, int(spec.shape[3])), np.float32
            )
    return feeds


def _relative(got: Array, want: Array) -> float:
    return float(np.abs(got - want).max() / max(1e-9, float(np.abs(want).max())))
