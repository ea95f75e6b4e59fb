"""The part of TensorRT's Python API that the backend uses, without TensorRT: for tests and docs.

A fake plan names an ONNX graph; a context computes it with ONNX Runtime's CPU provider on the
memory of a `FakeDevice`, where the addresses say. What TensorRT would refuse, or would answer with
wrong numbers, raises `Refused`: an unknown name, a shape outside of the profile, an address that is
missing or not aligned, a cache that is not updated in place, too little memory for the context, a
stream that is not the device's, a recording of shapes that were not run before, and one that is
launched after its context was changed.

Names and meanings are those of TensorRT 10.16, 11.x and RTX: ICudaEngine, IExecutionContext
(https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api/).
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_lite.runtime.backends.device import ALIGNMENT
from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.graph_io import graph_io
from trtllm_lite.runtime.engines.record import Profile, SharedWeight, shape_at
from trtllm_lite.runtime.engines.weight_inputs import with_weights_as_inputs
from trtllm_lite.runtime.manifest import Manifest, Phase, TensorSpec
from trtllm_lite.runtime.manifest_decode import decode

CONTEXT_BYTES = 4096
"""Device memory that every context needs while it runs."""
SCRATCH = 0xA5
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"

Shape = tuple[int, ...]


class Refused(Exception):
    """TensorRT would not do this, or would do it wrongly."""


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    FP8 = 6
    BF16 = 7
    INT64 = 8


class Severity(enum.Enum):
    ERROR = 1


class ILogger:
    """What a logger is derived from."""


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


_TYPES = {
    "tensor(float)": (DataType.FLOAT, np.float32),
    "tensor(float16)": (DataType.HALF, np.float16),
    "tensor(int8)": (DataType.INT8, np.int8),
    "tensor(int32)": (DataType.INT32, np.int32),
    "tensor(int64)": (DataType.INT64, np.int64),
}


def fake_plan(
    manifest: Manifest,
    graph: Path,
    phase: Phase,
    profile: Profile,
    capacity: int,
    *,
    more: Sequence[Profile] = (),
    weights: Sequence[SharedWeight] = (),
) -> bytes:
    """The plan of one graph of a bundle, for `FakeRuntime`. `graph`: its file; `more`: profiles
    behind the first one; `weights`: what is an input of it."""
    io = graph_io(manifest, phase)
    inputs = (*io.tokens, *io.past_keys, *io.past_values)
    return json.dumps(
        {
            "graph": str(graph),
            "capacity": {spec.name: capacity for pair in io.cache for spec in pair},
            "profiles": [
                {spec.name: _range(spec, box, capacity) for spec in inputs}
                for box in (profile, *more)
            ],
            "weights": [asdict(weight) for weight in weights],
            "aliases": {present.name: past.name for past, present in io.cache},
        }
    ).encode()


def _range(spec: TensorSpec, profile: Profile, capacity: int) -> list[Shape]:
    kinds = [{d.name: getattr(d, kind) for d in profile.dims} for kind in ("min", "opt", "max")]
    fixed = {d: capacity for d in spec.shape[2:3] if isinstance(d, str) and len(spec.shape) == 4}
    return [shape_at(spec, {**sizes, **fixed}) for sizes in kinds]


class FakeTensorRT:
    """The module. `ort` is onnxruntime. `engines` are those that were deserialized, in order."""

    TensorIOMode = TensorIOMode
    DataType = DataType
    ILogger = ILogger
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    __version__ = "0.0.fake"

    def __init__(self, ort: Any, device: FakeDevice) -> None:
        self.ort, self.device = ort, device
        self.engines: list[FakeEngine] = []

    def Runtime(self, logger: Any) -> "FakeRuntime":
        return FakeRuntime(self, logger)


class FakeRuntime:
    """Loads fake plans; None for anything else, as TensorRT has it."""

    def __init__(self, trt: FakeTensorRT, logger: Any) -> None:
        self._trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, data: bytes) -> "FakeEngine | None":
        try:
            facts = json.loads(data)
        except ValueError:
            self.logger.log(Severity.ERROR, "the plan is not one of this TensorRT")
            return None
        engine = FakeEngine(self._trt, facts)
        self._trt.engines.append(engine)
        return engine


class FakeEngine:
    """An engine. Its names, types and ranks are those of the ONNX graph."""

    def __init__(self, trt: FakeTensorRT, facts: Mapping[str, Any]) -> None:
        self.trt = trt
        options = trt.ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(Path(facts["graph"]).parent))
        weights = [decode(SharedWeight, w, strict=True) for w in facts["weights"]]
        model = with_weights_as_inputs(Path(facts["graph"]).read_bytes(), weights)
        self.session = trt.ort.InferenceSession(model, options, providers=providers)
        self.aliases: dict[str, str] = dict(facts["aliases"])
        self._capacity: dict[str, int] = facts["capacity"]
        self._profiles: list[dict[str, list[Shape]]] = [
            {name: [tuple(shape) for shape in shapes] for name, shapes in box.items()}
            for box in facts["profiles"]
        ]
        self.inputs = {x.name: x for x in self.session.get_inputs()}
        self.outputs = {x.name: x for x in self.session.get_outputs()}
        self._names: list[str] = [*self.inputs, *self.outputs]
        shapes = {name: self.get_tensor_shape(name) for name in self.inputs}
        self.fixed = {name: shape for name, shape in shapes.items() if min(shape) >= 0}
        """Inputs that have one shape only, which a context needs not be told."""
        self.executions: list[dict[str, Shape]] = []
        """The input shapes of every execution on any context, replayed ones included."""
        self._has_context = False

    @property
    def device_memory_size_v2(self) -> int:
        return CONTEXT_BYTES

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        if name in self.inputs:
            return TensorIOMode.INPUT
        return TensorIOMode.OUTPUT if name in self.outputs else TensorIOMode.NONE

    def get_tensor_dtype(self, name: str) -> DataType:
        return _TYPES[self._tensor(name).type][0]

    def get_tensor_shape(self, name: str) -> Shape:
        """-1 where the size is not fixed."""
        shape = [d if isinstance(d, int) else -1 for d in self._tensor(name).shape]
        if name in self._capacity:
            shape[2] = self._capacity[name]
        return tuple(shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[Shape]:
        if not 0 <= profile < len(self._profiles) or name not in self.inputs:
            raise Refused(f"there is no profile {profile} of {name!r}")
        fixed = self.fixed.get(name)
        return self._profiles[profile][name] if fixed is None else [fixed] * 3

    def get_aliased_input_tensor(self, name: str) -> str | None:
        if name not in self.outputs:
            raise Refused(f"{name!r} is no output")
        return self.aliases.get(name)

    def is_shape_inference_io(self, name: str) -> bool:
        self._tensor(name)
        return False

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy
    ) -> "FakeContext":
        if strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            raise Refused("the fake gives contexts no memory of its own")
        context = FakeContext(self, has_profile=not self._has_context)
        self._has_context = True
        return context

    def _tensor(self, name: str) -> Any:
        if self.get_tensor_mode(name) is TensorIOMode.NONE:
            raise Refused(f"there is no tensor {name!r}")
        return self.inputs.get(name) or self.outputs[name]


class FakeContext:
    """An execution context. What is queued has the shapes and addresses of the moment it was
    queued, as a CUDA graph keeps them; what was recorded depends on the context itself too, which
    must then stay as it is. `has_profile`: as the first context of an engine."""

    def __init__(self, engine: FakeEngine, *, has_profile: bool = True) -> None:
        self._engine = engine
        self._has_profile = has_profile
        self._profile = 0
        self._changes = 0
        self._device = engine.trt.device
        self._shapes: dict[str, Shape] = dict(engine.fixed)
        self._addresses: dict[str, int] = {}
        self._memory: tuple[int, int] | None = None
        self._run_with: dict[str, Shape] | None = None
        """The shapes of the last run that was not recorded, until one changes."""
        self.executions: list[dict[str, Shape]] = []
        """The input shapes of every execution, replayed ones included."""

    def set_device_memory(self, address: int, size: int) -> None:
        self._changes += 1
        self._device.bytes_at(address, size, on_device=True)
        self._memory = address, size

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Forgets the shapes."""
        there = 0 <= profile_index < self._engine.num_optimization_profiles
        if not there or stream_handle != self._device.stream:
            raise Refused(f"there is no profile {profile_index} on this stream")
        if self._memory is None:
            raise Refused("a profile may be copied into memory that the context does not have yet")
        self._changes += 1
        self._has_profile, self._run_with = True, None
        self._profile = profile_index
        self._shapes = dict(self._engine.fixed)
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self._changes += 1
        if name not in self._engine.inputs:
            raise Refused(f"there is no input {name!r}")
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        given = tuple(shape)
        fits = len(given) == len(low) and all(
            a <= size <= b for a, size, b in zip(low, given, high, strict=True)
        )
        if not fits:
            raise Refused(f"{name!r}: {given} is outside of the profile, {low} to {high}")
        if self._shapes.get(name) != given:
            self._shapes[name], self._run_with = given, None
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._changes += 1
        if self._engine.get_tensor_mode(name) is TensorIOMode.NONE:
            raise Refused(f"there is no tensor {name!r}")
        if address % ALIGNMENT:
            raise Refused(f"{name!r}: {address:#x} is not a multiple of {ALIGNMENT}")
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self._check(stream)
        shapes, addresses, changes = dict(self._shapes), dict(self._addresses), self._changes
        if self._device.is_recording and self._run_with != shapes:
            raise Refused("a run is recorded whose shapes were not run before")
        if self._device.is_recording:
            self._device.queue(lambda: self._replay(changes, shapes, addresses))
        else:
            self._run_with = shapes
            self._device.queue(lambda: self._compute(shapes, addresses))
        return True

    def _check(self, stream: int) -> None:
        engine = self._engine
        if stream != self._device.stream:
            raise Refused("the stream is not the device's")
        if self._memory is None or self._memory[1] < engine.device_memory_size_v2:
            raise Refused("the context has too little memory")
        if not self._has_profile:
            raise Refused("the context has no optimization profile")
        for name in engine.inputs:
            if name not in self._shapes:
                raise Refused(f"input {name!r} has no shape")
        for name in (*engine.inputs, *engine.outputs):
            if name not in self._addresses:
                raise Refused(f"{name!r} has no address")
        for output, source in engine.aliases.items():
            if self._addresses[output] != self._addresses[source]:
                raise Refused(f"{output!r} does not have the address of {source!r}")

    def _replay(
        self, changes: int, shapes: Mapping[str, Shape], addresses: Mapping[str, int]
    ) -> None:
        if changes != self._changes:
            raise Refused("a recorded run is launched whose context was changed since")
        self._compute(shapes, addresses)

    def _compute(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """On the device's own memory, and with the context's memory overwritten."""
        engine, ort = self._engine, self._engine.trt.ort
        self.executions.append(dict(shapes))
        engine.executions.append(dict(shapes))
        if self._memory is not None:
            self._device.bytes_at(*self._memory, on_device=True).fill(SCRATCH)
        binding, kept = engine.session.io_binding(), {}
        for name, shape in shapes.items():
            kept[name] = ort.OrtValue.ortvalue_from_numpy(self._array(name, shape, addresses[name]))
            binding.bind_ortvalue_input(name, kept[name])
        for name, tensor in engine.outputs.items():
            source = engine.aliases.get(name)
            if source is not None:
                binding.bind_ortvalue_output(name, kept[source])
                continue
            array = self._array(name, self._output_shape(tensor, shapes), addresses[name])
            kept[name] = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_output(name, kept[name])
        engine.session.run_with_iobinding(binding)

    def _array(self, name: str, shape: Shape, address: int) -> Any:
        tensor = self._engine.inputs.get(name) or self._engine.outputs[name]
        dtype = np.dtype(_TYPES[tensor.type][1])
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = self._device.bytes_at(address, nbytes, on_device=True)
        return memory.view(dtype).reshape(shape)

    def _output_shape(self, tensor: Any, shapes: Mapping[str, Shape]) -> Shape:
        """From the names of dimensions that inputs have."""
        sizes: dict[str, int] = {}
        for name, source in self._engine.inputs.items():
            sizes |= {
                d: n for d, n in zip(source.shape, shapes[name], strict=True) if isinstance(d, str)
            }
        return tuple(d if isinstance(d, int) else sizes[d] for d in tensor.shape)
