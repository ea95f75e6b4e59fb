"""The backend of the `cpu` target: opens a bundle's graphs with ONNX Runtime."""

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.backends.base import SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.graph_io import ActualTensor, check_actual, graph_io
from trtllm_lite.runtime.backends.kv_pool import KVPool
from trtllm_lite.runtime.backends.ort_session import LoadedGraph, OrtSession, one_line
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import BundleError, MissingExtraError, UsageError
from trtllm_lite.runtime.host import physical_cores
from trtllm_lite.runtime.manifest import Phase

OLDEST = (1, 32)
"""GroupQueryAttention takes `query_seqlens`, which ragged prefill needs, from this version on."""

SPIN_BRIEFLY = "100"
"""Microseconds: long enough to bridge two operators, short enough to leave an idle core idle."""
SPIN_FOREVER = "10000000"

_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int8)": "int8",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
}
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


def open_session(bundle: Bundle, options: SessionOptions) -> OrtSession:
    """Load both graphs and map the KV pool.

    Raises MissingExtraError without a recent enough onnxruntime, BundleError for a graph that
    cannot be loaded or does not match its table, UsageError for options that cannot be honoured.
    """
    _check_options(bundle, options)
    ort = _import_onnxruntime()
    threads = options.intra_op_num_threads or physical_cores()
    graphs = {phase: _open_graph(ort, bundle, phase, threads, options) for phase in _PHASES}
    pool = KVPool(bundle.manifest.kv, options.num_slots, options.capacity)
    info = SessionInfo("onnxruntime", "cpu", threads, bundle.manifest.kv.bytes_per_token)
    return OrtSession(ort, graphs, pool, options, info)


def _check_options(bundle: Bundle, options: SessionOptions) -> None:
    if bundle.manifest.target != "cpu":
        raise BundleError("target", f"{bundle.manifest.target!r}; this backend runs 'cpu'")
    for name in ("num_slots", "capacity", "intra_op_num_threads"):
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name}: got {value!r}; allowed: integers from 1")


def _import_onnxruntime() -> Any:
    try:
        ort = import_module("onnxruntime")
    except ModuleNotFoundError as error:
        raise MissingExtraError("onnxruntime", "cpu") from error
    version = tuple(int(x) for x in re.findall(r"\d+", ort.__version__)[:2])
    if version < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise MissingExtraError(f"onnxruntime {needed} or newer (found {ort.__version__})", "cpu")
    return ort


def _open_graph(
    ort: Any, bundle: Bundle, phase: Phase, threads: int, options: SessionOptions
) -> LoadedGraph:
    io = graph_io(bundle.manifest, phase)
    session = _load(
        ort, bundle.graph_path(phase), io.field, _session_options(ort, threads, options)
    )
    spec = bundle.manifest.graph(phase)
    check_actual(f"{io.field}.inputs", spec.inputs, _actual(session.get_inputs()))
    check_actual(f"{io.field}.outputs", spec.outputs, _actual(session.get_outputs()))
    for past in (*io.past_keys, *io.past_values):
        if isinstance(past.shape[2], int) and past.shape[2] != options.capacity:
            raise UsageError(
                f"capacity: got {options.capacity}; the graph is fixed at {past.shape[2]} tokens"
            )
    return LoadedGraph(io, session)


def _load(ort: Any, path: Path, field_name: str, session_options: Any) -> Any:
    """From the path, not from bytes: the weights lie beside the graph."""
    try:
        return ort.InferenceSession(str(path), session_options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BundleError(f"{field_name}.file", f"cannot be loaded: {one_line(error)}") from error


def _session_options(ort: Any, threads: int, options: SessionOptions) -> Any:
    result = ort.SessionOptions()
    result.intra_op_num_threads = threads
    result.inter_op_num_threads = 1
    result.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    result.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    result.log_severity_level = 3
    result.add_session_config_entry("session.intra_op.allow_spinning", "1")
    result.add_session_config_entry(
        "session.intra_op.spin_duration_us", SPIN_FOREVER if options.spin else SPIN_BRIEFLY
    )
    return result


def _actual(tensors: Sequence[Any]) -> list[ActualTensor]:
    return [ActualTensor(t.name, _TYPES.get(t.type, t.type), tuple(t.shape)) for t in tensors]
