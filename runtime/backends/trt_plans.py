"""TensorRT plans loaded and held against the contract: names, types, shapes, aliases, profiles.

`trt` is the TensorRT module (`tensorrt` or `tensorrt_rtx`), handed in by whoever found it. Only
what both have in 10.16, 11.x and RTX is used.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtllm_lite.runtime.backends.device import Device, DeviceMemoryError
from trtllm_lite.runtime.backends.graph_io import ActualTensor, GraphIO, check_actual, graph_io
from trtllm_lite.runtime.backends.shared_weights import upload_weights
from trtllm_lite.runtime.backends.trt_contexts import WorkingMemory, captures_itself, new_context
from trtllm_lite.runtime.backends.trt_pieces import Bounds, RunLimits
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.record import RECORD_NAME, SharedWeight
from trtllm_lite.runtime.engines.store import StoredEngine
from trtllm_lite.runtime.errors import BundleError, UsageError
from trtllm_lite.runtime.manifest import Phase, TensorSpec

SINGLE: Mapping[Phase, int] = {"decode": 0, "extend": 1}
"""What the profiles of an extend plan are for where it runs all phases; prefill is a case of the
second."""


@dataclass(frozen=True, eq=False)
class LoadedPlan:
    """An engine with one of its profiles, and a context for whatever is not recorded."""

    io: GraphIO
    engine: Any
    profile: int
    context: Any
    limits: RunLimits


@dataclass(frozen=True, eq=False)
class _Maker:
    """Makes contexts whose weights are in place."""

    trt: Any
    memory: WorkingMemory
    stream: int
    weights: Mapping[str, int]
    """Addresses of those that plans have as inputs."""

    def context(self, engine: Any, profile: int, *, fixed: bool = False) -> Any | None:
        """None where TensorRT makes none."""
        made = new_context(self.trt, engine, self.memory, self.stream, profile=profile, fixed=fixed)
        if made is not None:
            for name in _weights_of(engine, self.weights):
                if not made.set_tensor_address(name, self.weights[name]):
                    return None
        return made


@dataclass(frozen=True, eq=False)
class LoadedPlans:
    """The plans of a bundle over one block of device memory, which their contexts share: only one
    of them runs at a time. `runtime` is kept because the engines live no longer than it does."""

    maker: _Maker
    runtime: Any
    plans: Mapping[Phase, LoadedPlan]

    def __getitem__(self, phase: Phase) -> LoadedPlan:
        return self.plans[phase]

    @property
    def captures_itself(self) -> bool:
        """Whether the contexts to record need no recording."""
        return captures_itself(self.maker.trt)

    def context_to_record(self, phase: Phase) -> Any | None:
        """One more context of a plan, for a run of fixed shapes. None where TensorRT makes none."""
        plan = self.plans[phase]
        return self.maker.context(plan.engine, plan.profile, fixed=True)


def load_plans(
    trt: Any,
    logger: Any,
    device: Device,
    bundle: Bundle,
    stored: StoredEngine,
    phases: Collection[Phase],
) -> LoadedPlans:
    """Deserialize the plans that these graphs have, check them, copy the weights that they share to
    the device, and give their contexts memory. Raises BundleError for a plan that does not load or
    does not keep the contract, UsageError when the memory cannot be had."""
    record = stored.record
    on_device = upload_weights(device, bundle, record.weights)
    runtime = trt.Runtime(logger)
    engines: list[tuple[GraphIO, Any]] = []
    graphs: list[Phase] = ["extend"] if record.key.is_single else [*phases]
    # One after the other: the bytes of a plan may hold all of the weights.
    for phase in graphs:
        io = graph_io(bundle.manifest, phase)
        engines.append((io, _engine(runtime, phase, stored.plan_bytes(phase))))
        check_engine(trt, engines[-1][1], io, record.key.capacity, record.weights)
    memory = _allocate(device, max(1, *(int(x.device_memory_size_v2) for _, x in engines)))
    maker = _Maker(trt, memory, device.stream, on_device.addresses)
    plans: dict[Phase, LoadedPlan] = {}
    for io, engine in engines:
        profiles = SINGLE if record.key.is_single else {io.phase: 0}
        plans |= {p: _plan(maker, engine, io, index) for p, index in profiles.items()}
    return LoadedPlans(maker, runtime, plans)


def _allocate(device: Device, size: int) -> WorkingMemory:
    try:
        return WorkingMemory(device.allocate(size), size)
    except DeviceMemoryError as error:
        raise UsageError(
            f"the plans need {size / 2**20:.0f} MiB to work in, which {device.name} does not have "
            "free; build plans for a lower --max-num-seqs or --max-model-len"
        ) from error


def _engine(runtime: Any, phase: Phase, data: bytes) -> Any:
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise BundleError(
            f"{phase}.plan", "TensorRT does not load it; build it again on this machine"
        )
    return engine


def _plan(maker: _Maker, engine: Any, io: GraphIO, profile: int) -> LoadedPlan:
    if not profile < engine.num_optimization_profiles:
        raise BundleError(f"{io.phase}.plan", f"has no optimization profile {profile}")
    context = maker.context(engine, profile)
    if context is None:
        raise BundleError(f"{io.phase}.plan", "TensorRT makes no execution context for it")
    return LoadedPlan(io, engine, profile, context, limits_of(engine, io, profile))


def check_engine(
    trt: Any,
    engine: Any,
    io: GraphIO,
    capacity: int,
    weights: Collection[SharedWeight] = (),
) -> None:
    """Raise BundleError unless the engine has exactly the tensors of the table, with the cache of
    `capacity` tokens, and some of `weights`, and updates the cache where it lies."""
    names, shared = _names(engine), {w.name: w for w in weights}
    is_input = {n: engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT for n in names}
    actual = {n: _actual(trt, engine, n) for n in names}
    field = f"{io.phase}.plan"
    inputs = (*io.tokens, *_at(capacity, (*io.past_keys, *io.past_values)))
    outputs = (io.logits, *_at(capacity, (*io.present_keys, *io.present_values)))
    rest = [actual[n] for n in names if is_input[n] and n not in shared]
    check_actual(f"{field} inputs", inputs, rest)
    check_actual(f"{field} outputs", outputs, [actual[n] for n in names if not is_input[n]])
    for name in names:
        if name in shared:
            _check_weight(field, shared[name], actual[name])
        if engine.is_shape_inference_io(name):
            raise BundleError(field, f"{name!r} is read on the host, to compute shapes")
    for past, present in io.cache:
        aliased = engine.get_aliased_input_tensor(present.name)
        if aliased != past.name:
            said = repr(aliased) if aliased else "nothing"
            text = f"{present.name!r} is written over {said}, not in place over {past.name!r}"
            raise BundleError(field, text)


def _check_weight(field: str, weight: SharedWeight, actual: ActualTensor) -> None:
    """The memory behind its address has just the bytes that the record says."""
    if (actual.dtype, actual.shape) != (weight.dtype, weight.shape):
        text = f"{weight.name!r} is {actual.dtype} {list(actual.shape)} in the plan"
        raise BundleError(field, f"{text}, {weight.dtype} {list(weight.shape)} in {RECORD_NAME}")


def _names(engine: Any) -> list[str]:
    return [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]


def _weights_of(engine: Any, weights: Collection[str]) -> list[str]:
    return [name for name in _names(engine) if name in weights]


def limits_of(engine: Any, io: GraphIO, profile: int) -> RunLimits:
    """What a profile of the engine allows. A dimension that no input has is one."""
    shapes = {spec.role: engine.get_tensor_profile_shape(spec.name, profile) for spec in io.tokens}
    least, _, most = (tuple(shape) for shape in shapes["input_ids"])
    wanted = Bounds(1, 1)
    if "logits_indices" in shapes:
        low, _, high = (tuple(shape) for shape in shapes["logits_indices"])
        wanted = Bounds(int(low[1]), int(high[1]))
    rows, seq = (Bounds(int(a), int(b)) for a, b in zip(least, most, strict=True))
    return RunLimits(rows, seq, wanted)


def _at(capacity: int, specs: tuple[TensorSpec, ...]) -> list[TensorSpec]:
    """The cache tensors as they are in a plan, whose capacity is fixed."""
    return [replace(s, shape=(*s.shape[:2], capacity, s.shape[3])) for s in specs]


def _actual(trt: Any, engine: Any, name: str) -> ActualTensor:
    """A dimension that is not fixed is -1 in TensorRT."""
    dtypes = {
        trt.DataType.FLOAT: "float32",
        trt.DataType.HALF: "float16",
        trt.DataType.BF16: "bfloat16",
        trt.DataType.INT32: "int32",
        trt.DataType.INT64: "int64",
        trt.DataType.INT8: "int8",
        trt.DataType.FP8: "float8e4m3fn",
    }
    dtype = engine.get_tensor_dtype(name)
    shape = tuple(None if d < 0 else int(d) for d in engine.get_tensor_shape(name))
    return ActualTensor(name, dtypes.get(dtype, str(dtype)), shape)
