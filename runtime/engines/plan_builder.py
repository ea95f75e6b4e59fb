"""One ONNX graph -> one serialized plan.

The graph's capacity is fixed in its bytes, the parsed network is held against the contract table,
its attentions are put right, and it is built for one or more GPUs. Nothing is written here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.engines.attention_patch import (
    AttentionForm,
    AttentionPatch,
    BuildError,
    Patched,
)
from trtllm_lite.runtime.engines.memory import reported
from trtllm_lite.runtime.engines.monitor import watched
from trtllm_lite.runtime.engines.onnx_edit import attention_nodes, with_fixed_dim
from trtllm_lite.runtime.engines.profiles import capacity_dim
from trtllm_lite.runtime.engines.record import Profile, SharedWeight, shape_at
from trtllm_lite.runtime.engines.timing_cache import TimingCacheFile
from trtllm_lite.runtime.engines.trt_api import Builder, Config, Network, Parser, Tensor
from trtllm_lite.runtime.engines.trt_log import Messages, shared_logger
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.engines.weight_inputs import with_weights_as_inputs
from trtllm_lite.runtime.manifest import GraphSpec, TensorSpec
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.runtime.protobuf import WireError

NO_KERNEL = "not supported by a dedicated kernel"
UNUSED = "Unused Input"
MAX_REASONS = 3
DTYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "float8e4m3fn": "FP8",
}
"""Names of TensorRT's DataType."""

Described = tuple[str, tuple[int, ...]]
"""Name of the type, and shape; -1 is a size that is not fixed."""


@dataclass(frozen=True)
class PlanRequest:
    """What to build: the ONNX file of `graph` at `path`, its weights beside it.

    gpus: among `TensorRT.nameable_gpus`, or the one of this machine. exact: the factors of float32
    products are not rounded to TF32. user_allocation: memory of a run is the caller's alone, as
    recorded runs need it in TensorRT-RTX. weights: what becomes an input of the plan, where the
    graph has it.
    """

    graph: GraphSpec
    path: Path
    profiles: tuple[Profile, ...]
    capacity: int
    gpus: tuple[str, ...]
    exact: bool
    form: AttentionForm
    timing: TimingCacheFile | None = None
    user_allocation: bool = False
    weights: tuple[SharedWeight, ...] = ()


@dataclass(frozen=True)
class BuiltPlan:
    """A serialized plan, and what the builder said of its memory. decomposed: some attention has no
    kernel of its own and runs in several steps, which takes more memory."""

    data: memoryview
    patched: Patched
    decomposed: bool
    weights_bytes: int | None
    scratch_bytes: int | None
    activation_bytes: int | None


@dataclass(frozen=True, eq=False)
class ParsedGraph:
    """A network, and what it points into: its numbers are the parser's, and the patch's."""

    builder: Builder
    parser: Parser
    network: Network
    patch: AttentionPatch
    patched: Patched


def build_plan(trt: TensorRT, request: PlanRequest, progress: Progress) -> BuiltPlan:
    """Raises BuildError with what TensorRT says. Attentions without a kernel of their own are
    tried a second time, in several steps."""
    try:
        return _build(trt, request, progress, decomposable=False)
    except BuildError as error:
        if NO_KERNEL not in str(error):
            raise
    progress.note(
        f"{request.graph.phase}: TensorRT has no kernel for some attention of this shape; it runs "
        "in several steps, which takes more memory and time"
    )
    return _build(trt, request, progress, decomposable=True)


def _build(
    trt: TensorRT, request: PlanRequest, progress: Progress, *, decomposable: bool
) -> BuiltPlan:
    with shared_logger(trt.module).listening() as messages:
        parsed = parse_graph(trt, request, decomposable=decomposable)
        config = _config(trt, parsed.builder, request)
        data = _serialize(trt, parsed, config, messages, request, progress)
    if request.timing is not None:
        request.timing.keep(config)
    lines = messages.lines
    sizes = [reported(lines, what) for what in ("weights", "scratch", "activation")]
    return BuiltPlan(memoryview(data), parsed.patched, decomposable, *sizes)


def parse_graph(trt: TensorRT, request: PlanRequest, *, decomposable: bool = False) -> ParsedGraph:
    """The network that a plan is built from: parsed, held against the table of the graph, its
    attentions put right. Raises BuildError."""
    model = _edited(request)
    logger = shared_logger(trt.module).for_tensorrt
    builder: Builder = trt.module.Builder(logger)
    network = builder.create_network(trt.network_flags)
    parser: Parser = trt.module.OnnxParser(network, logger)
    _parse(parser, model, request)
    check_network(network, request.graph, request.capacity, request.weights)
    patch = AttentionPatch(trt, network, request.capacity, request.form, decomposable=decomposable)
    return ParsedGraph(builder, parser, network, patch, patch.apply(attention_nodes(model)))


def _edited(request: PlanRequest) -> bytes:
    """The graph's bytes with its capacity fixed and shared weights as inputs."""
    data, dim = request.path.read_bytes(), capacity_dim(request.graph)
    try:
        if dim is not None:
            data = with_fixed_dim(data, dim, request.capacity)
        return with_weights_as_inputs(data, request.weights) if request.weights else data
    except WireError as error:
        raise BuildError(f"{request.graph.file}: {error}") from None


def _parse(parser: Parser, model: bytes, request: PlanRequest) -> None:
    if parser.parse(model, str(request.path)):
        return
    said = [parser.get_error(i) for i in range(parser.num_errors)]
    text = "; ".join(f"{e.desc()} ({e.node_operator()} {e.node_name()!r})" for e in said)
    raise BuildError(f"TensorRT does not parse {request.graph.file}: {text}")


def check_network(
    network: Network,
    graph: GraphSpec,
    capacity: int,
    weights: Sequence[SharedWeight] = (),
) -> None:
    """Raise BuildError unless the network has the inputs and outputs of the table, and no others
    but `weights`, each input read by some layer: an input that nothing reads is one whose meaning
    was lost."""
    sizes = _sizes(graph, capacity)
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    names = {tensor.name for tensor in inputs}
    wanted = _described(graph.inputs, sizes)
    wanted |= {w.name: (DTYPES[w.dtype], w.shape) for w in weights if w.name in names}
    _compare(graph, wanted, inputs)
    _compare(graph, _described(graph.outputs, sizes), outputs)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    read = {
        tensor.name
        for layer in layers
        for j in range(layer.num_inputs)
        if (tensor := layer.get_input(j)) is not None
    }
    for tensor in inputs:
        if tensor.name not in read:
            text = f"TensorRT reads {graph.file} without its input {tensor.name!r}"
            raise BuildError(f"{text}, so it would compute something else")


def _sizes(graph: GraphSpec, capacity: int) -> dict[str, int]:
    """The size of every symbolic dimension in the network: -1 for all but the capacity."""
    tensors: Sequence[TensorSpec] = (*graph.inputs, *graph.outputs)
    names = {d for t in tensors for d in t.shape if isinstance(d, str)}
    return {name: capacity if name == capacity_dim(graph) else -1 for name in names}


def _described(table: Sequence[TensorSpec], sizes: Mapping[str, int]) -> dict[str, Described]:
    return {t.name: (DTYPES[t.dtype], shape_at(t, sizes)) for t in table}


def _compare(graph: GraphSpec, wanted: Mapping[str, Described], tensors: Sequence[Tensor]) -> None:
    found = {t.name: (t.dtype.name, tuple(t.shape)) for t in tensors}
    if wanted.keys() != found.keys():
        odd = ", ".join(sorted(wanted.keys() ^ found.keys()))
        raise BuildError(f"{graph.file} and the parsed network differ in {odd}")
    for name, (dtype, shape) in wanted.items():
        got, dims = found[name]
        # TensorRT need not know all sizes of an output before it runs.
        fits = len(dims) == len(shape) and all(
            d == w or -1 in (d, w) for d, w in zip(dims, shape, strict=True)
        )
        if got != dtype or not fits:
            text = f"{name!r} is {got} {list(dims)} in the parsed network"
            raise BuildError(f"{graph.file}: {text}, {dtype} {list(shape)} in bundle.json")


def _config(trt: TensorRT, builder: Builder, request: PlanRequest) -> Config:
    config = builder.create_builder_config()
    flags = trt.module.BuilderFlag
    if request.exact:
        config.clear_flag(flags.TF32)
    if request.user_allocation:
        config.set_flag(flags.REQUIRE_USER_ALLOCATION)
    if trt.nameable_gpus:
        config.num_compute_capabilities = len(request.gpus)
        for i, gpu in enumerate(request.gpus):
            if not config.set_compute_capability(trt.capability(gpu), i):
                raise BuildError(f"{trt.words} does not build for {gpu}")
    if request.timing is not None:
        request.timing.load(config)
    for profile in request.profiles:
        _add_profile(builder, config, request, profile)
    return config


def _add_profile(builder: Builder, config: Config, request: PlanRequest, profile: Profile) -> None:
    made = builder.create_optimization_profile()
    capacity = {name: request.capacity for name in [capacity_dim(request.graph)] if name}
    for spec in request.graph.inputs:
        if any(isinstance(d, str) and d not in capacity for d in spec.shape):
            corners = (
                shape_at(spec, capacity | {d.name: getattr(d, end) for d in profile.dims})
                for end in ("min", "opt", "max")
            )
            made.set_shape(spec.name, *corners)
    if config.add_optimization_profile(made) < 0:
        raise BuildError(f"TensorRT refuses the sizes {profile} of {request.graph.file}")


def _reasons(errors: Sequence[str]) -> str:
    """The first errors. Those about a driver that is not there follow any other one."""
    real = [text for text in dict.fromkeys(errors) if "catchCudaError" not in text] or errors
    return "; ".join(real[:MAX_REASONS]) or "it gives no reason"


def _serialize(
    trt: TensorRT,
    parsed: ParsedGraph,
    config: Config,
    messages: Messages,
    request: PlanRequest,
    progress: Progress,
) -> Any:
    def build(monitor: Any) -> Any:
        config.progress_monitor = monitor
        return parsed.builder.build_serialized_network(parsed.network, config)

    data = watched(trt.module, build, progress)
    name = request.graph.file
    if data is None:
        raise BuildError(f"TensorRT does not build {name}: {_reasons(messages.errors)}")
    lost = [text for text in messages.warnings if UNUSED in text]
    if lost:
        raise BuildError(f"TensorRT builds {name} into something else: {'; '.join(lost)}")
    return data
