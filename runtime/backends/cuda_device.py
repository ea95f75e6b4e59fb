"""The device behind NVIDIA's CUDA runtime, through the package cuda-bindings.

The calls are those of https://docs.nvidia.com/cuda/cuda-runtime-api/. Copies say
`cudaMemcpyDefault`: with unified addressing the runtime knows from an address where it lies.
It has never run on a GPU; what is proved of it without one: every name and signature against the
package, and what is called in which order against a stand-in of it.
"""

import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from trtllm_lite.runtime.backends.cuda_errors import LOST
from trtllm_lite.runtime.backends.device import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    HostBuffer,
)

OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation"""
NON_BLOCKING = 1
"""cudaStreamNonBlocking: no waiting for the default stream, where other libraries may work."""


class CudaGraph:
    """An instantiated CUDA graph."""

    def __init__(self, cuda: "Cuda", executable: Any, stream: int) -> None:
        self._cuda, self._executable, self._stream = cuda, executable, stream

    def launch(self) -> None:
        self._cuda.call("cudaGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        executable, self._executable = self._executable, None
        if executable is not None:
            self._cuda.call("cudaGraphExecDestroy", executable)


class Cuda:
    """Calls of the CUDA runtime whose error codes become errors. `runtime`: the module."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of the call: None, a value, or several. Raises DeviceError, DeviceMemoryError
        or DeviceLostError."""
        code, *results = getattr(self.runtime, name)(*arguments)
        if int(code):
            raise _kind(int(code))(f"CUDA: {name} failed: {self._words(code)}")
        if len(results) > 1:
            return tuple(results)
        return results[0] if results else None

    def _words(self, code: Any) -> str:
        name, text = (
            getattr(self.runtime, function)(code)[1].decode()
            for function in ("cudaGetErrorName", "cudaGetErrorString")
        )
        return f"{text} ({name})"


class CudaDevice:
    """The GPU `index` of those that the process sees."""

    def __init__(self, cuda: Cuda, index: int = 0) -> None:
        self._cuda = cuda
        self._index = index
        self._memory: dict[int, str] = {}
        """What frees each allocation."""
        self._closed = False
        self.use()
        properties = self._call("cudaGetDeviceProperties", index)
        self._name = _text(properties.name)
        self._gpu = f"sm{int(properties.major)}{int(properties.minor)}"
        self._stream = int(self._call("cudaStreamCreateWithFlags", NON_BLOCKING))

    @property
    def name(self) -> str:
        return self._name

    @property
    def gpu(self) -> str:
        return self._gpu

    @property
    def stream(self) -> int:
        return self._stream

    def use(self) -> None:
        self._call("cudaSetDevice", self._index)

    def allocate(self, nbytes: int) -> int:
        address = int(self._call("cudaMalloc", max(1, nbytes)))
        self._memory[address] = "cudaFree"
        return address

    def allocate_host(self, nbytes: int) -> HostBuffer:
        address = int(self._call("cudaMallocHost", max(1, nbytes)))
        self._memory[address] = "cudaFreeHost"
        pinned = (ctypes.c_uint8 * nbytes).from_address(address)
        return HostBuffer(np.frombuffer(memoryview(pinned), np.uint8), address)

    def free(self, address: int) -> None:
        self.synchronize()
        self._call(self._memory.pop(address), address)

    def fill_zero(self, address: int, nbytes: int) -> None:
        self._call("cudaMemsetAsync", address, 0, nbytes, self._stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        kind = self._cuda.runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpyAsync", target, source, nbytes, kind, self._stream)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        kind = self._cuda.runtime.cudaMemcpyKind.cudaMemcpyDefault
        places = (target, target_pitch, source, source_pitch)
        self._call("cudaMemcpy2DAsync", *places, width, rows, kind, self._stream)

    def record(self, queue_work: Callable[[], None]) -> CudaGraph:
        mode = self._cuda.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)
        try:
            queue_work()
        except BaseException:
            # The stream takes no other work before its capture has ended, broken or not.
            self._cuda.runtime.cudaStreamEndCapture(self._stream)
            raise
        graph = self._call("cudaStreamEndCapture", self._stream)
        try:
            executable = self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)
        return CudaGraph(self._cuda, executable, self._stream)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self._stream)

    def memory(self) -> tuple[int, int]:
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def close(self) -> None:
        """Errors are of no use here: the memory of a broken context is gone with it."""
        if self._closed:
            return
        self._closed = True
        runtime = self._cuda.runtime
        runtime.cudaSetDevice(self._index)
        runtime.cudaStreamSynchronize(self._stream)
        for address, function in self._memory.items():
            getattr(runtime, function)(address)
        self._memory.clear()
        runtime.cudaStreamDestroy(self._stream)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._cuda.call(name, *arguments)


def open_cuda(index: int = 0) -> CudaDevice:
    """The GPU `index`. Raises DeviceError without the package, a driver or a GPU."""
    try:
        runtime = import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise DeviceError(
            "CUDA: the package cuda-bindings is not installed: pip install cuda-bindings"
        ) from error
    return CudaDevice(Cuda(runtime), index)


def _kind(code: int) -> type[DeviceError]:
    if code == OUT_OF_MEMORY:
        return DeviceMemoryError
    return DeviceLostError if code in LOST else DeviceError


def _text(name: bytes | str) -> str:
    """A fixed field of a C structure."""
    return name.decode(errors="replace").rstrip("\0") if isinstance(name, bytes) else name
