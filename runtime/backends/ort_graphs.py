"""A bundle's graphs opened with ONNX Runtime: prepared for this machine where that is possible."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.backends.base import SessionOptions, Spin
from trtllm_lite.runtime.backends.graph_io import (
    ActualTensor,
    check_actual,
    graph_io,
    with_cache_dtype,
)
from trtllm_lite.runtime.backends.ort_prepared import ort_preparer, prepared_name
from trtllm_lite.runtime.backends.ort_session import LoadedGraph, one_line
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import BundleError, UsageError
from trtllm_lite.runtime.huge_pages import (
    anonymous_spans,
    collapse,
    give_back_free_memory,
    without,
)
from trtllm_lite.runtime.kernels import Kernels, find_kernels
from trtllm_lite.runtime.kv_dtype import choose_kv_dtype
from trtllm_lite.runtime.manifest import KVSpec, Manifest, Phase
from trtllm_lite.runtime.mapped_weights import map_weights
from trtllm_lite.runtime.native_table import DATA_NAME, FEW_TOKENS, graph_name
from trtllm_lite.runtime.native_weights import (
    has_native,
    native_preparer,
    read_table,
)
from trtllm_lite.runtime.onnx_wire import operators

SPIN_MICROSECONDS: dict[Spin, int] = {"off": 0, "brief": 100, "long": 2000}
"""How long a thread waits at full speed for its next piece of work. "brief" bridges two operators
and leaves the core idle between steps; "long" bridges two steps as well."""

_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int8)": "int8",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedGraphs:
    """`mapped`: the weights are mapped from files that other sessions and processes share.
    `kv`: the cache that the graphs have. `huge_page_bytes`: private memory that was gathered into
    huge pages. `native`: our own kernels run; both phases are then one session."""

    graphs: Mapping[Phase, LoadedGraph]
    mapped: bool
    kv: KVSpec
    huge_page_bytes: int = 0
    native: bool = False


def open_graphs(ort: Any, bundle: Bundle, threads: int, options: SessionOptions) -> OpenedGraphs:
    """Open the phases that are asked for.

    With a host cache the weights are mapped from prepared files, unless huge pages are asked for,
    which files cannot promise. Raises BundleError, UsageError.
    """
    native = _open_native(ort, bundle, threads, options)
    if native is not None:
        give_back_free_memory()
        return native
    before = anonymous_spans()
    graphs = _open_prepared(ort, bundle, threads, options)
    mapped = graphs is not None
    if graphs is None:
        paths = {phase: bundle.graph_path(phase) for phase in options.phases}
        graphs = _open_all(ort, bundle, paths, _session_options(ort, threads, options), options)
    give_back_free_memory()
    wanted = not mapped if options.huge_pages is None else options.huge_pages
    huge = collapse(without(anonymous_spans(), before)) if wanted else 0
    return OpenedGraphs(graphs, mapped, bundle.manifest.kv, huge)


def _open_native(
    ort: Any, bundle: Bundle, threads: int, options: SessionOptions
) -> OpenedGraphs | None:
    """The graph over our own kernels, for all phases at once. None where it cannot be had; when it,
    or what only it can do, was asked for by name, UsageError says why."""
    found = find_kernels()
    reason = _why_not_native(bundle, options, found)
    folder, preparer = None, native_preparer(bundle)
    if not reason and options.host_cache is not None:
        folder = options.host_cache.prepared(preparer, options.progress)
        reason = "" if folder is not None else "its weights cannot be prepared on this machine"
    if folder is None:
        _refuse_without_native(bundle, options, reason)
        return None
    settings = _session_options(ort, threads, options)
    settings.register_custom_ops_library(str(found.library))
    kind = choose_kv_dtype(options.kv_dtype, read_table(bundle).kv_dtypes)
    try:
        name = graph_name(options.rounding, kind)
        weights = _give_weights(ort, settings, folder / name)
        session = _load(ort, folder / name, name, settings)
        manifest = with_cache_dtype(bundle.manifest, kind)
        least = {"decode": 1, "prefill": _least_prompt_tokens(folder / name)}
        graphs = {
            phase: replace(
                _checked(manifest, phase, session, options),
                weights=weights,
                least_tokens=least[phase],
            )
            for phase in options.phases
        }
        return OpenedGraphs(graphs, mapped=True, kv=manifest.kv, native=True)
    except BundleError as error:
        if _needs_native(bundle, options) or options.host_cache is None:
            raise
        _log.warning("loading without the native kernels: %s", error)
        options.host_cache.discard(preparer)
        return None


def _give_weights(ort: Any, settings: Any, graph: Path) -> list[Any]:
    """Let the session use the mapped weights where they lie: our kernels take them as they are. It
    keeps no reference to what is returned."""
    try:
        arrays = map_weights(graph, graph.with_name(DATA_NAME))
    except OSError as error:
        raise BundleError(DATA_NAME, f"cannot be mapped: {one_line(error)}") from error
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    for name, value in values.items():
        settings.add_initializer(name, value)
    return [settings, *values.values(), *arrays.values()]


def _least_prompt_tokens(graph: Path) -> int:
    """A prompt is computed in one way, however it is cut into chunks, whatever was taken from the
    prefix cache and whoever shares the run: never in the kernels' way for few tokens. ONNX
    Runtime's attention is one way of its own, and takes no filling."""
    return 1 if "GroupQueryAttention" in operators(graph.read_bytes()) else FEW_TOKENS + 1


def _needs_native(bundle: Bundle, options: SessionOptions) -> bool:
    """Whether something was asked for by name that ONNX Runtime's operators cannot do."""
    other_cache = options.kv_dtype not in ("auto", bundle.manifest.kv.dtype)
    return options.kernels == "native" or options.rounding == "exact" or other_cache


def _refuse_without_native(bundle: Bundle, options: SessionOptions, reason: str) -> None:
    """Raises UsageError where `_needs_native`."""
    if options.kernels == "native":
        raise UsageError(f"kernels: got 'native'; not possible here: {reason}")
    if options.rounding == "exact":
        raise UsageError(
            "rounding: got 'exact'; only the native kernels round so, and they do not run "
            f"here: {reason}; leave it out"
        )
    if _needs_native(bundle, options):
        raise UsageError(
            f"kv_dtype: got {options.kv_dtype!r}; only the native kernels have such a cache, and "
            f"they do not run here: {reason}; allowed: {bundle.manifest.kv.dtype}"
        )


def _why_not_native(bundle: Bundle, options: SessionOptions, found: Kernels) -> str:
    """Empty when the native kernels can run this bundle."""
    if options.kernels == "onnxruntime":
        return "ONNX Runtime's were asked for"
    if not has_native(bundle):
        return "the bundle has no graph for them (export with --quantize)"
    if options.host_cache is None or options.huge_pages:
        return "they need the host cache, whose files have no huge pages"
    return found.reason


def _open_prepared(
    ort: Any, bundle: Bundle, threads: int, options: SessionOptions
) -> Mapping[Phase, LoadedGraph] | None:
    """None without a cache, or where its files cannot be had or used."""
    cache = options.host_cache
    if cache is None or options.huge_pages:
        return None
    sources = {graph.phase: bundle.graph_path(graph.phase) for graph in bundle.manifest.graphs}
    preparer = ort_preparer(ort, sources)
    folder = cache.prepared(preparer, options.progress)
    if folder is None:
        return None
    settings = _session_options(ort, threads, options)
    # The graph is optimised already, and is what was optimised for this machine.
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    paths = {phase: folder / prepared_name(phase) for phase in options.phases}
    try:
        return _open_all(ort, bundle, paths, settings, options)
    except BundleError as error:
        _log.warning("loading without the prepared files in %s: %s", folder, error)
        cache.discard(preparer)
        return None


def _open_all(
    ort: Any,
    bundle: Bundle,
    paths: Mapping[Phase, Path],
    settings: Any,
    options: SessionOptions,
) -> Mapping[Phase, LoadedGraph]:
    """One after the other and in this thread: what the C library keeps of the memory that loading
    took for a while can only be given back where it came from the first arena."""
    return {
        phase: _open(ort, bundle, phase, path, settings, options) for phase, path in paths.items()
    }


def _open(
    ort: Any, bundle: Bundle, phase: Phase, path: Path, settings: Any, options: SessionOptions
) -> LoadedGraph:
    io = graph_io(bundle.manifest, phase)
    return _checked(bundle.manifest, phase, _load(ort, path, io.field, settings), options)


def _checked(
    manifest: Manifest, phase: Phase, session: Any, options: SessionOptions
) -> LoadedGraph:
    """The session as the graph of a phase, if it has that phase's table."""
    io = graph_io(manifest, phase)
    spec = manifest.graph(phase)
    check_actual(f"{io.field}.inputs", spec.inputs, actual_tensors(session.get_inputs()))
    check_actual(f"{io.field}.outputs", spec.outputs, actual_tensors(session.get_outputs()))
    for past in (*io.past_keys, *io.past_values):
        if isinstance(past.shape[2], int) and past.shape[2] != options.capacity:
            raise UsageError(
                f"capacity: got {options.capacity}; the graph is fixed at {past.shape[2]} tokens"
            )
    return LoadedGraph(io, session)


def _load(ort: Any, path: Path, field_name: str, settings: Any) -> Any:
    """From the path, not from bytes: the weights lie beside the graph."""
    try:
        return ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BundleError(f"{field_name}.file", f"cannot be loaded: {one_line(error)}") from error


def _session_options(ort: Any, threads: int, options: SessionOptions) -> Any:
    result = ort.SessionOptions()
    result.intra_op_num_threads = threads
    result.inter_op_num_threads = 1
    result.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    result.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    result.log_severity_level = 3
    spin = SPIN_MICROSECONDS[options.spin]
    result.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    if spin:
        result.add_session_config_entry("session.intra_op.spin_duration_us", str(spin))
    return result


def actual_tensors(tensors: Sequence[Any]) -> list[ActualTensor]:
    """Inputs or outputs as a session of ONNX Runtime reports them."""
    return [ActualTensor(t.name, _TYPES.get(t.type, t.type), tuple(t.shape)) for t in tensors]
