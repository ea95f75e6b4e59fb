"""The fake device refuses what would crash a GPU, and the CUDA device calls what it should."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

from trtllm_lite.runtime.backends import cuda_device
from trtllm_lite.runtime.backends.cuda_device import (
    NON_BLOCKING,
    OUT_OF_MEMORY,
    Cuda,
    CudaDevice,
    open_cuda,
)
from trtllm_lite.runtime.backends.cuda_errors import LOST, says_lost
from trtllm_lite.runtime.backends.device import (
    Device,
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
)
from trtllm_lite.runtime.backends.fake_device import FakeDevice


def test_queued_work_is_done_in_order_and_only_when_somebody_waits() -> None:
    device = FakeDevice()
    host, there = device.allocate_host(8), device.allocate(8)
    host.array[:] = range(8)
    device.copy(there, host.address, 8)
    device.fill_zero(there, 2)
    device.copy(host.address, there, 8)
    host.array[7] = 70  # a copy that is still queued reads this
    assert host.array.tolist() == [0, 1, 2, 3, 4, 5, 6, 70]
    device.synchronize()
    assert host.array.tolist() == [0, 0, 2, 3, 4, 5, 6, 70]


def test_rows_are_copied_with_their_pitches() -> None:
    device = FakeDevice()
    host, there = device.allocate_host(12), device.allocate(20)
    host.array[:] = range(12)
    device.fill_zero(there, 20)
    device.copy_rows(there, 5, host.address + 1, 4, 2, 3)
    device.synchronize()
    assert device.bytes_at(there, 12).tolist() == [1, 2, 0, 0, 0, 5, 6, 0, 0, 0, 9, 10]


def test_recorded_work_is_repeated_with_its_addresses() -> None:
    device = FakeDevice()
    host, there = device.allocate_host(4), device.allocate(4)
    recorded = device.record(lambda: device.copy(there, host.address, 4))
    device.synchronize()
    assert device.bytes_at(there, 4).tolist() == [255] * 4
    for value in (3, 4):
        host.array[:] = value
        recorded.launch()
        device.synchronize()
        assert device.bytes_at(there, 4).tolist() == [value] * 4
    recorded.close()
    with pytest.raises(DeviceError, match="closed"):
        recorded.launch()
    with pytest.raises(DeviceError, match="while work is recorded"):
        device.record(device.synchronize)
    with pytest.raises(DeviceError, match="while work is recorded"):
        device.record(lambda: device.free(there))


def test_ranges_that_were_not_allocated_are_refused() -> None:
    device = FakeDevice(total=1000)
    there, host = device.allocate(100), device.allocate_host(100)
    assert np.isnan(device.bytes_at(there, 100).view(np.float16)).all()
    wrong = [(there, 101), (there - 1, 2), (there + 99, 2), (there + 100, 1), (7, 1)]
    for address, nbytes in wrong:
        with pytest.raises(DeviceError, match="are no memory"):
            device.bytes_at(address, nbytes)
    with pytest.raises(DeviceMemoryError, match="950 bytes asked for, 900 are free"):
        device.allocate(950)
    device.free(there)
    with pytest.raises(DeviceError, match="nothing was allocated"):
        device.free(there)
    assert device.memory() == (1000, 1000)
    with pytest.raises(DeviceError, match="not possible"):
        device.copy_rows(host.address, 3, host.address + 50, 4, 4, 2)


def test_queued_work_that_fails_loses_the_device() -> None:
    device = FakeDevice(total=1000)
    there, host = device.allocate(100), device.allocate_host(100)
    device.fill_zero(host.address, 4)
    calls: list[Callable[[], object]] = [
        device.synchronize,
        device.synchronize,
        device.use,
        lambda: device.fill_zero(there, 4),
        lambda: device.free(there),
    ]
    for call in calls:
        with pytest.raises(DeviceLostError, match="no device memory"):
            call()


@dataclass
class Properties:
    name: bytes = b"NVIDIA Test\0\0\0"
    major: int = 8
    minor: int = 9


class Handle(int):
    """A stream or a graph: a class of its own that int() takes."""


@dataclass
class FakeCuda:
    """The module cuda.bindings.runtime: every call returns an error code and its results."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    fail: dict[str, int] = field(default_factory=dict)
    buffers: list[Any] = field(default_factory=list)

    class cudaMemcpyKind:
        cudaMemcpyDefault = "default"

    class cudaStreamCaptureMode:
        cudaStreamCaptureModeThreadLocal = "thread"

    RESULTS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "cudaGetDeviceProperties": (Properties(),),
        "cudaStreamCreateWithFlags": (Handle(77),),
        "cudaMalloc": (4096,),
        "cudaMemGetInfo": (10, 20),
        "cudaStreamEndCapture": ("graph",),
        "cudaGraphInstantiate": ("executable",),
    }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        if name in ("cudaGetErrorName", "cudaGetErrorString"):
            return lambda code: (0, f"{name[12:]} of {code}".encode())

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == "cudaMallocHost":
                self.buffers.append(np.zeros(arguments[0], np.uint8))
                return 0, self.buffers[-1].ctypes.data
            return self.fail.get(name, 0), *self.RESULTS.get(name, ())

        return call


def open_fake() -> tuple[FakeCuda, CudaDevice]:
    runtime = FakeCuda()
    device = CudaDevice(Cuda(runtime), 1)
    runtime.calls.clear()
    return runtime, device


def test_the_cuda_device_queues_on_its_stream() -> None:
    runtime, device = open_fake()
    assert (device.name, device.gpu, device.stream) == ("NVIDIA Test", "sm89", 77)
    assert device.memory() == (10, 20)
    assert device.allocate(5) == 4096
    host = device.allocate_host(6)
    host.array[:] = 3
    assert runtime.buffers[0].tolist() == [3] * 6
    runtime.calls.clear()
    device.use()
    device.copy(1, 2, 3)
    device.copy_rows(1, 10, 2, 20, 5, 4)
    device.fill_zero(4096, 5)
    device.synchronize()
    assert runtime.calls == [
        ("cudaSetDevice", 1),
        ("cudaMemcpyAsync", 1, 2, 3, "default", 77),
        ("cudaMemcpy2DAsync", 1, 10, 2, 20, 5, 4, "default", 77),
        ("cudaMemsetAsync", 4096, 0, 5, 77),
        ("cudaStreamSynchronize", 77),
    ]


def test_a_cuda_graph_is_captured_instantiated_and_launched() -> None:
    runtime, device = open_fake()
    recorded = device.record(lambda: device.copy(1, 2, 3))
    recorded.launch()
    recorded.close()
    recorded.close()
    assert [call[0] for call in runtime.calls] == [
        *("cudaStreamBeginCapture", "cudaMemcpyAsync", "cudaStreamEndCapture"),
        *("cudaGraphInstantiate", "cudaGraphDestroy", "cudaGraphLaunch", "cudaGraphExecDestroy"),
    ]
    assert ("cudaGraphLaunch", "executable", 77) in runtime.calls

    def broken() -> None:
        raise ValueError("queued work failed")

    runtime.calls.clear()
    with pytest.raises(ValueError, match="queued work failed"):
        device.record(broken)
    assert [call[0] for call in runtime.calls] == ["cudaStreamBeginCapture", "cudaStreamEndCapture"]


def test_codes_become_errors_with_cudas_own_words() -> None:
    runtime, device = open_fake()
    runtime.fail = {"cudaMalloc": 2, "cudaStreamSynchronize": 700}
    with pytest.raises(DeviceMemoryError, match=r"cudaMalloc failed: String of 2 \(Name of 2\)"):
        device.allocate(5)
    with pytest.raises(DeviceError, match="cudaStreamSynchronize failed: String of 700"):
        device.synchronize()
    for code, kind in ((700, DeviceLostError), (719, DeviceLostError), (214, DeviceLostError)):
        runtime.fail = {"cudaStreamSynchronize": code}
        with pytest.raises(kind):
            device.synchronize()
    for code in (1, 400, 701, 901):
        runtime.fail = {"cudaStreamSynchronize": code}
        with pytest.raises(DeviceError) as caught:
            device.synchronize()
        assert type(caught.value) is DeviceError
    runtime.fail = {"cudaSetDevice": 100}
    with pytest.raises(DeviceError, match="cudaSetDevice failed"):
        CudaDevice(Cuda(runtime), 3)


def test_closing_a_cuda_device_frees_what_is_left_whatever_fails() -> None:
    runtime, device = open_fake()
    address = device.allocate(5)
    host = device.allocate_host(6)
    runtime.calls.clear()
    runtime.fail = {"cudaStreamSynchronize": 700, "cudaFree": 700}
    device.close()
    device.close()
    assert [call[0] for call in runtime.calls] == [
        *("cudaSetDevice", "cudaStreamSynchronize", "cudaFree", "cudaFreeHost"),
        "cudaStreamDestroy",
    ]
    assert runtime.calls[2:4] == [("cudaFree", address), ("cudaFreeHost", host.address)]


def test_freeing_waits_first() -> None:
    runtime, device = open_fake()
    address = device.allocate(5)
    runtime.calls.clear()
    device.free(address)
    assert [call[0] for call in runtime.calls] == ["cudaStreamSynchronize", "cudaFree"]


def test_without_cuda_bindings_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(cuda_device, "import_module", missing)
    with pytest.raises(DeviceError, match="not installed: pip install cuda-bindings"):
        open_cuda()


def test_every_call_is_one_of_the_real_module_with_as_many_arguments() -> None:
    """What the stand-in above was called with, against the first lines of the real docstrings."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    used = set(re.findall(r'(?<!")"(cuda[A-Z]\w+)"(?!")', inspect.getsource(cuda_device)))
    used |= set(re.findall(r"runtime\.(cuda[A-Z]\w+)", inspect.getsource(cuda_device)))
    assert int(runtime.cudaError_t.cudaErrorMemoryAllocation) == OUT_OF_MEMORY
    assert runtime.cudaStreamNonBlocking == NON_BLOCKING
    fake, device = open_fake()
    host = device.allocate_host(4)
    device.use()
    device.copy(device.allocate(4), host.address, 4)
    device.copy_rows(1, 1, 2, 1, 1, 1)
    device.fill_zero(1, 1)
    device.record(lambda: None).close()
    device.record(lambda: None).launch()
    device.memory()
    device.close()
    assert len(used) > 15
    for name in used:
        assert hasattr(runtime, name), name
    for name, *arguments in fake.calls:
        signature = getattr(runtime, name).__doc__.strip().splitlines()[0]
        inside = re.search(r"\((.*)\)", signature)
        assert inside is not None
        count = len([x for x in inside.group(1).split(",") if x.strip()])
        assert len(arguments) == count, signature


def test_what_loses_a_device_is_what_cuda_says() -> None:
    """By the descriptions that the package carries of the errors of its version."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    errors = {int(x): x for x in runtime.cudaError_t}
    assert {code: errors[code].name for code in LOST} == LOST
    texts = {code: " ".join(str(x.__doc__).split()) for code, x in errors.items()}
    said = {code for code, text in texts.items() if "must be terminated and relaunched" in text}
    assert len(said) >= 10
    assert said <= set(LOST)


def test_an_error_of_onnxruntime_says_which_it_was() -> None:
    text = "CUDA failure {}: an illegal memory access was encountered ; GPU=0 ; hostname=x ; file="
    assert says_lost(text.format(700))
    assert not says_lost(text.format(2))
    assert not says_lost("CUBLAS failure 700: no code of CUDA")


def test_both_devices_are_devices() -> None:
    _, device = open_fake()
    devices: list[Device] = [FakeDevice(), device]
    assert [d.gpu for d in devices] == ["sm89", "sm89"]
