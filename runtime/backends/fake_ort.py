"""The part of ONNX Runtime that sessions on a GPU use, without a GPU: for tests and docs.

A session takes its inputs from the addresses that are bound and puts its outputs there, in the
memory of a `FakeDevice`, which is stricter than a GPU's. It computes with ONNX Runtime on the CPU,
in its turn of the device's queue. What the providers that build TensorRT engines would refuse, or
would answer by running something else, raises `Refused`.
"""

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.ort_providers import CPU, CUDA, RTX, TENSORRT

TENSORRT_OPTIONS = frozenset(
    {
        "device_id",
        "user_compute_stream",
        "trt_engine_cache_enable",
        "trt_engine_cache_path",
        "trt_profile_min_shapes",
        "trt_profile_opt_shapes",
        "trt_profile_max_shapes",
    }
)
RTX_OPTIONS = frozenset(
    {
        "has_user_compute_stream",
        "user_compute_stream",
        "nv_runtime_cache_path",
        "nv_profile_min_shapes",
        "nv_profile_opt_shapes",
        "nv_profile_max_shapes",
    }
)
"""Of those that the providers know, what is used here."""

Shape = tuple[int, ...]


class Refused(Exception):
    """ONNX Runtime or a provider would not do this, or would do something else."""


@dataclass(frozen=True)
class Place:
    """What an IO binding knows of one tensor."""

    device: str
    dtype: Any
    shape: Shape
    address: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * int(np.dtype(self.dtype).itemsize)


@dataclass
class FakeBinding:
    """Inputs and outputs by name."""

    inputs: dict[str, Place] = field(default_factory=dict)
    outputs: dict[str, Place] = field(default_factory=dict)

    def bind_input(self, name: str, device: str, _: int, dtype: Any, shape: Any, at: int) -> None:
        self.inputs[name] = Place(device, dtype, tuple(shape), at)

    def bind_output(self, name: str, device: str, _: int, dtype: Any, shape: Any, at: int) -> None:
        self.outputs[name] = Place(device, dtype, tuple(shape), at)

    def in_host_memory(self) -> dict[str, bytes]:
        """The inputs that lie there, as they are now."""
        return {
            name: ctypes.string_at(place.address, place.nbytes)
            for name, place in self.inputs.items()
            if place.device == "cpu"
        }


class FakeRunOptions:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.terminate = False

    def add_run_config_entry(self, name: str, value: str) -> None:
        self.entries[name] = value


class BoundInference:
    """An inference session that runs where its binding says. `before_run` is called with the run's
    options. `real`: the module that computes."""

    def __init__(self, real: Any, device: FakeDevice, path: str) -> None:
        self.device = device
        self._real = real.InferenceSession(path, providers=[CPU])
        self.before_run: Callable[[Any], None] = lambda options: None

    def get_inputs(self) -> Any:
        return self._real.get_inputs()

    def get_outputs(self) -> Any:
        return self._real.get_outputs()

    def io_binding(self) -> FakeBinding:
        return FakeBinding()

    def run_with_iobinding(self, binding: FakeBinding, options: FakeRunOptions) -> None:
        self.before_run(options)
        if options.terminate:
            raise RuntimeError("terminated")
        self.queue(binding, binding.in_host_memory())

    def queue(self, binding: FakeBinding, host: Mapping[str, bytes]) -> None:
        """Let it compute in its turn. host: bytes of the inputs in host memory."""
        self.device.queue(lambda: self._compute(binding, host))

    def _compute(self, binding: FakeBinding, host: Mapping[str, bytes]) -> None:
        feeds = {}
        for name, place in binding.inputs.items():
            data: Any = host.get(name)
            if data is None:
                data = self.device.bytes_at(place.address, place.nbytes, on_device=True)
            feeds[name] = np.frombuffer(data, place.dtype).reshape(place.shape).copy()
        names = list(binding.outputs)
        for name, array in zip(names, self._real.run(names, feeds), strict=True):
            place = binding.outputs[name]
            if array.shape != place.shape:
                raise Refused(f"{name!r} is {array.shape}; {place.shape} is bound")
            target = self.device.bytes_at(place.address, place.nbytes, on_device=True)
            target[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class EngineInference(BoundInference):
    """A session on a provider that builds engines. It keeps one in its folder, and is loaded from
    there when it finds its own: `built` tells. A run has to be within the profile, with the cache
    in place."""

    def __init__(
        self, ort: "FakeEngineOrt", path: str, settings: "FakeSettings", name: str, prefix: str
    ) -> None:
        super().__init__(ort.real, ort.device, path)
        options = settings.options
        self.path = path
        self.provider = name
        self.ranges = [
            _shapes(options[f"{prefix}_profile_{kind}_shapes"]) for kind in ("min", "opt", "max")
        ]
        self._fixed = settings.fixed
        self._stray = ort.stray
        self._check_inputs()
        if options["user_compute_stream"] != str(ort.device.stream):
            raise Refused("the provider has another stream")
        self.built = self._load_or_build(path, settings.engine_folder)
        self.runs: list[dict[str, Shape]] = []

    def get_provider_graph_assignment_info(self) -> list[Any]:
        node = SimpleNamespace(op_type="Attention", name="attention.0")
        part = SimpleNamespace(ep_name=self.provider, get_nodes=lambda: [node])
        stray = SimpleNamespace(op_type="Softmax", name="stray")
        other = SimpleNamespace(ep_name=CPU, get_nodes=lambda: [stray])
        return [part, other] if self._stray else [part]

    def run_with_iobinding(self, binding: FakeBinding, options: FakeRunOptions) -> None:
        low, _, high = self.ranges
        for name, place in binding.inputs.items():
            fits = zip(low[name], place.shape, high[name], strict=True)
            if not all(a <= size <= b for a, size, b in fits):
                raise Refused(f"{name!r}: {place.shape} is outside of the profile")
            present = name.replace("past_", "present_", 1)
            if present in binding.outputs and binding.outputs[present] != place:
                raise Refused(f"{name!r} is not updated in place")
        self.runs.append({name: place.shape for name, place in binding.inputs.items()})
        super().run_with_iobinding(binding, options)

    def _check_inputs(self) -> None:
        for tensor in self.get_inputs():
            shape = [self._fixed.get(d, d) for d in tensor.shape]
            for given in self.ranges:
                if tensor.name not in given or len(given[tensor.name]) != len(shape):
                    raise Refused(f"no profile for the input {tensor.name!r}")
            if len(shape) == 4 and not isinstance(shape[2], int):
                raise Refused("KV cache tensor must have a static sequence length dimension")

    def _load_or_build(self, path: str, folder: str | None) -> bool:
        data = hashlib.sha256(Path(path).read_bytes() + repr(self.ranges).encode()).digest()
        kept = None if folder is None else Path(folder) / f"{Path(path).stem}.engine"
        if kept is not None and kept.exists():
            if kept.read_bytes() != data:
                raise Refused("an engine of another graph was found")
            return False
        if kept is not None:
            kept.write_bytes(data)
        return True


class FakeSettings:
    """`ort.SessionOptions`."""

    def __init__(self) -> None:
        self.log_severity_level = 2
        self.fixed: dict[str, int] = {}
        self.entries: dict[str, str] = {}
        self.options: dict[str, str] = {}

    @property
    def engine_folder(self) -> str | None:
        kept = self.options.get("trt_engine_cache_enable") == "True"
        rtx = self.options.get("nv_runtime_cache_path")
        return self.options["trt_engine_cache_path"] if kept else rtx

    def add_session_config_entry(self, name: str, value: str) -> None:
        self.entries[name] = value

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        self.fixed[name] = size

    def add_provider_for_devices(self, devices: Sequence[Any], options: dict[str, str]) -> None:
        if [device.ep_name for device in devices] != [RTX] or options.keys() - RTX_OPTIONS:
            raise Refused(f"{devices}, {sorted(options)}")
        self.options = options


class FakeEngineOrt:
    """The module, with both providers that build engines. `real`: onnxruntime, which computes.
    `stray`: a node lands elsewhere. `registered`: the libraries of providers."""

    __version__ = "1.31.1"
    RunOptions = FakeRunOptions
    SessionOptions = FakeSettings

    def __init__(self, real: Any, device: FakeDevice) -> None:
        self.real, self.device = real, device
        self.providers = [TENSORRT, CUDA, CPU]
        self.stray = False
        self.registered: dict[str, str] = {}
        self.sessions: list[EngineInference] = []

    def get_available_providers(self) -> list[str]:
        return self.providers

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if name in self.registered:
            raise Refused(f"{name} is registered already")
        self.registered[name] = path

    def get_ep_devices(self) -> list[Any]:
        found = [CPU, *self.registered]
        return [SimpleNamespace(ep_name=name) for name in found]

    def InferenceSession(
        self, path: str, settings: FakeSettings, providers: Any = (), enable_fallback: int = 1
    ) -> EngineInference:
        if enable_fallback:
            raise Refused("what fails would go on without the provider")
        name, prefix = RTX, "nv"
        if providers:
            ((name, settings.options), _, _), prefix = providers, "trt"
            unknown = settings.options.keys() - TENSORRT_OPTIONS
            if name != TENSORRT or unknown:
                raise Refused(f"Invalid TensorRT EP option: {unknown}")
        if settings.entries.get("session.record_ep_graph_assignment_info") != "1":
            raise Refused("nothing is recorded of where nodes land")
        self.sessions.append(EngineInference(self, path, settings, name, prefix))
        return self.sessions[-1]


def _shapes(text: str) -> dict[str, Shape]:
    """As the providers read them."""
    pairs = (part.split(":") for part in text.split(","))
    return {name: tuple(int(d) for d in shape.split("x")) for name, shape in pairs}
