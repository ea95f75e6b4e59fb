"""TensorRT plans loaded and held against the contract: names, types, shapes, aliases, profiles.

`trt` is the TensorRT module (`tensorrt` or `tensorrt_rtx`), handed in by whoever found it. Only
what both have in 10.16, 11.x and RTX is used.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtllm_lite.runtime.backends.device import Device, DeviceMemoryError
from trtllm_lite.runtime.backends.graph_io import ActualTensor, GraphIO, check_actual, graph_io
from trtllm_lite.runtime.backends.trt_pieces import Bounds, RunLimits
from trtllm_lite.runtime.errors import BundleError, UsageError
from trtllm_lite.runtime.manifest import Manifest, Phase, TensorSpec

PROFILE = 0
"""The optimization profile that a context has without being told. Plans are built with one."""


@dataclass(frozen=True, eq=False)
class LoadedPlan:
    """An engine and its context, which has no device memory of its own yet. `memory_bytes`: what it
    needs while it runs."""

    io: GraphIO
    engine: Any
    context: Any
    limits: RunLimits
    memory_bytes: int


@dataclass(frozen=True, eq=False)
class LoadedPlans:
    """The plans of a bundle over one block of device memory, which their contexts share: only one
    of them runs at a time. `runtime` is kept because the engines live no longer than it does."""

    runtime: Any
    plans: Mapping[Phase, LoadedPlan]
    memory: int

    def __getitem__(self, phase: Phase) -> LoadedPlan:
        return self.plans[phase]


def load_plans(
    trt: Any,
    logger: Any,
    device: Device,
    manifest: Manifest,
    capacity: int,
    phases: Collection[Phase],
    read: Callable[[Phase], bytes],
) -> LoadedPlans:
    """Deserialize the plans, check them, and give their contexts memory. `capacity`: tokens of a
    slot in all of them; `read` gives the bytes of one. Raises BundleError for a plan that does not
    load or does not keep the contract, UsageError when the memory cannot be had."""
    runtime = trt.Runtime(logger)
    # One after the other: the bytes of a plan may hold all of the weights.
    plans = {p: _load(trt, runtime, manifest, p, capacity, read(p)) for p in phases}
    size = max(1, *(plan.memory_bytes for plan in plans.values()))
    try:
        memory = device.allocate(size)
    except DeviceMemoryError as error:
        raise UsageError(
            f"the plans need {size / 2**20:.0f} MiB to work in, which {device.name} does not have "
            "free; build plans for a lower --max-num-seqs or --max-model-len"
        ) from error
    for plan in plans.values():
        plan.context.set_device_memory(memory, size)
    return LoadedPlans(runtime, plans, memory)


def _load(
    trt: Any, runtime: Any, manifest: Manifest, phase: Phase, capacity: int, data: bytes
) -> LoadedPlan:
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise BundleError(
            f"{phase}.plan", "TensorRT does not load it; build it again on this machine"
        )
    io = graph_io(manifest, phase)
    check_engine(trt, engine, io, capacity)
    user_managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    context = engine.create_execution_context(user_managed)
    if context is None:
        raise BundleError(f"{phase}.plan", "TensorRT makes no execution context for it")
    return LoadedPlan(io, engine, context, limits_of(engine, io), int(engine.device_memory_size_v2))


def check_engine(trt: Any, engine: Any, io: GraphIO, capacity: int) -> None:
    """Raise BundleError unless the engine has exactly the tensors of the table, with the cache of
    `capacity` tokens, and updates the cache where it lies."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    is_input = {n: engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT for n in names}
    actual = {n: _actual(trt, engine, n) for n in names}
    field = f"{io.phase}.plan"
    inputs = (*io.tokens, *_at(capacity, (*io.past_keys, *io.past_values)))
    outputs = (io.logits, *_at(capacity, (*io.present_keys, *io.present_values)))
    check_actual(f"{field} inputs", inputs, [actual[n] for n in names if is_input[n]])
    check_actual(f"{field} outputs", outputs, [actual[n] for n in names if not is_input[n]])
    for name in names:
        if engine.is_shape_inference_io(name):
            raise BundleError(field, f"{name!r} is read on the host, to compute shapes")
    for past, present in cache_pairs(io):
        aliased = engine.get_aliased_input_tensor(present.name)
        if aliased != past.name:
            said = repr(aliased) if aliased else "nothing"
            text = f"{present.name!r} is written over {said}, not in place over {past.name!r}"
            raise BundleError(field, text)


def cache_pairs(io: GraphIO) -> list[tuple[TensorSpec, TensorSpec]]:
    """Past and present of each layer: all keys, then all values."""
    return [
        *zip(io.past_keys, io.present_keys, strict=True),
        *zip(io.past_values, io.present_values, strict=True),
    ]


def limits_of(engine: Any, io: GraphIO) -> RunLimits:
    """What the profile of the engine allows. A dimension that no input has is one."""
    shapes = {spec.role: engine.get_tensor_profile_shape(spec.name, PROFILE) for spec in io.tokens}
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
    }
    dtype = engine.get_tensor_dtype(name)
    shape = tuple(None if d < 0 else int(d) for d in engine.get_tensor_shape(name))
    return ActualTensor(name, dtypes.get(dtype, str(dtype)), shape)
