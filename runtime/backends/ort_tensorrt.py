"""TensorRT through ONNX Runtime: bundles of the `tensorrt` target on a provider that builds engines
by itself, with no plans of ours.

The providers parse with TensorRT's own ONNX parser, and nobody can put back what that drops: the
lengths of rows that an attention reads (`runtime/engines/attention_patch.py`). So only graphs
whose attention says all with masks are run.

It has never run on a GPU, and no engine was ever built by these providers. Proved without: which
options they accept, and all but the GPU's part against a stand-in (`fake_ort.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_lite.runtime.backends.base import SessionInfo, SessionOptions
from trtllm_lite.runtime.backends.device import Device
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.graph_io import check_actual, graph_io
from trtllm_lite.runtime.backends.ort_cuda import import_gpu, open_gpu
from trtllm_lite.runtime.backends.ort_engine_cache import EngineCache
from trtllm_lite.runtime.backends.ort_graphs import actual_tensors
from trtllm_lite.runtime.backends.ort_providers import (
    EngineSettings,
    ProfileShapes,
    Provider,
    ProviderChoice,
    find_provider,
)
from trtllm_lite.runtime.backends.ort_session import one_line
from trtllm_lite.runtime.backends.ort_tensorrt_session import OrtTensorrtSession, ProviderGraph
from trtllm_lite.runtime.backends.phases import graphs_to_open, has_extend, takes_several_tokens
from trtllm_lite.runtime.backends.trt_pieces import Bounds, RunLimits
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.onnx_edit import attention_nodes
from trtllm_lite.runtime.engines.profiles import EngineLimits, capacity_dim, profiles
from trtllm_lite.runtime.engines.record import Profile, shape_at
from trtllm_lite.runtime.errors import BundleError, UsageError
from trtllm_lite.runtime.manifest import GraphSpec, Limits, Phase
from trtllm_lite.runtime.protobuf import WireError

TARGET = "tensorrt"


@dataclass(frozen=True)
class OrtMachinery:
    """Where ONNX Runtime and the GPU come from."""

    onnxruntime: Callable[[], Any] = import_gpu
    open_device: Callable[[], Device] = lambda: open_gpu(TARGET)


@dataclass(frozen=True, eq=False)
class FoundProvider:
    """A provider that is there, and a bundle that it computes rightly. Whoever found it opens a
    session, which then owns the device, or closes it. `chunk`: most tokens of a step."""

    bundle: Bundle
    ort: Any
    provider: Provider
    device: Device
    chunk: int

    @property
    def limits(self) -> Limits:
        """What an engine on it may have at most."""
        return self.bundle.manifest.limits

    def open(self, options: SessionOptions) -> OrtTensorrtSession:
        """Build the engines, or load those that are kept, and reserve the KV pool. Raises
        BundleError for a graph that cannot be loaded or does not keep its table, UsageError for
        memory that is not there and for nodes that the provider does not take; the device is closed
        then."""
        try:
            return self._open(options)
        except BaseException:
            self.device.close()
            raise

    def close(self) -> None:
        self.device.close()

    def _open(self, options: SessionOptions) -> OrtTensorrtSession:
        manifest, device = self.bundle.manifest, self.device
        device.use()
        limits = EngineLimits(options.num_slots, options.capacity - self.chunk, self.chunk)
        phases = graphs_to_open(manifest, options.phases)
        graphs = {phase: self._graph(manifest.graph(phase), limits) for phase in phases}
        pool = DevicePool(device, manifest.kv, options.num_slots, limits.capacity)
        info = SessionInfo(
            "onnxruntime",
            device.name,
            1,
            manifest.kv.bytes_per_token,
            multi_token_decode=takes_several_tokens(manifest),
            kernels="tensorrt",
            kv_dtype=manifest.kv.dtype,
            kv_reserved=True,
        )
        return OrtTensorrtSession(self.ort, graphs, device, pool, options, info)

    def _graph(self, spec: GraphSpec, limits: EngineLimits) -> ProviderGraph:
        (profile,) = profiles(spec, limits)
        shapes = profile_shapes(spec, profile, limits.capacity)
        of = (self.provider.name, self.provider.version, self.device.gpu, repr(shapes))
        cache = EngineCache(self.bundle, spec.phase, of)
        session = self._session(spec, limits.capacity, shapes, cache)
        io = graph_io(self.bundle.manifest, spec.phase)
        self._check_placement(session, spec.phase)
        check_actual(f"{io.field}.outputs", spec.outputs, actual_tensors(session.get_outputs()))
        cache.seal()
        return ProviderGraph(io, session, _run_limits(spec, profile), cache)

    def _session(
        self, spec: GraphSpec, capacity: int, shapes: ProfileShapes, cache: EngineCache
    ) -> Any:
        given = self.ort.SessionOptions()
        given.log_severity_level = 3
        given.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if (dim := capacity_dim(spec)) is not None:
            # A cache needs a static length in TensorRT.
            given.add_free_dimension_override_by_name(dim, capacity)
        settings = EngineSettings(self.device.stream, shapes, cache.folder)
        path = str(self.bundle.graph_path(spec.phase))
        try:
            return self.provider.session(path, given, settings)
        except Exception as error:
            text = f"{self.provider.name} cannot load it: {one_line(error)}"
            raise BundleError(spec.file, text) from error

    def _check_placement(self, session: Any, phase: Phase) -> None:
        """Raises UsageError unless the provider has taken every node."""
        others: dict[str, set[str]] = {}
        parts = session.get_provider_graph_assignment_info()
        for part in parts:
            if part.ep_name != self.provider.name:
                others.setdefault(part.ep_name, set()).update(x.op_type for x in part.get_nodes())
        if others or not parts:
            where = "; ".join(f"{name}: {', '.join(sorted(x))}" for name, x in others.items())
            raise UsageError(
                f"provider: {self.provider.name} has not taken the whole {phase} graph "
                f"({where or 'it was not loaded'}); {self.provider.install}; or leave --provider "
                "out"
            )


def find_engine_provider(
    bundle: Bundle, choice: ProviderChoice, chunk: int, machinery: OrtMachinery | None = None
) -> FoundProvider:
    """The provider of that name for a bundle. Raises UsageError for a bundle that it would compute
    wrongly, and where something is missing to run it; MissingExtraError without onnxruntime-gpu."""
    check_runnable(bundle, choice)
    machinery = machinery or OrtMachinery()
    ort = machinery.onnxruntime()
    provider = find_provider(ort, choice)
    return FoundProvider(bundle, ort, provider, machinery.open_device(), chunk)


def check_runnable(bundle: Bundle, choice: ProviderChoice) -> None:
    """Raises UsageError unless TensorRT's parser reads the graphs as they are meant."""
    target, again = bundle.manifest.target, "export with --target tensorrt --attention mask"
    if target != TARGET or not has_extend(bundle.manifest):
        raise UsageError(
            f"provider: got {choice!r}; the bundle's target is {target}, whose operators are not "
            f"TensorRT's; {again}"
        )
    for graph in bundle.manifest.graphs:
        try:
            nodes = attention_nodes(bundle.graph_path(graph.phase).read_bytes())
        except WireError as error:
            raise BundleError(graph.file, str(error)) from error
        over_cache = graph.phase != "prefill"
        if any(node.lengths is not None or (over_cache and node.is_causal) for node in nodes):
            raise UsageError(
                f"provider: got {choice!r}; attention of the {graph.phase} graph reads lengths of "
                "rows, which TensorRT's parser drops, or is causal over the cache without them; it "
                f"would compute something else; {again}"
            )


def profile_shapes(spec: GraphSpec, profile: Profile, capacity: int) -> ProfileShapes:
    """Of the graph's inputs, the cache of `capacity` tokens included."""
    dim = capacity_dim(spec)
    fixed = {} if dim is None else {dim: capacity}

    def written(sizes: dict[str, int]) -> str:
        shapes = ((x.name, shape_at(x, {**sizes, **fixed})) for x in spec.inputs)
        return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes)

    return ProfileShapes(
        written({d.name: d.min for d in profile.dims}),
        written({d.name: d.opt for d in profile.dims}),
        written({d.name: d.max for d in profile.dims}),
    )


def _run_limits(spec: GraphSpec, profile: Profile) -> RunLimits:
    """A dimension that is fixed is one."""
    indices = spec.by_role("logits_indices")
    dims = (*spec.by_role("input_ids")[0].shape, indices[0].shape[1] if indices else 1)
    rows, seq, wanted = (_bounds(profile, dim) for dim in dims)
    return RunLimits(rows, seq, wanted)


def _bounds(profile: Profile, dim: int | str) -> Bounds:
    found = profile.range_of(str(dim))
    return Bounds(1, 1) if found is None else Bounds(found.min, found.max)
