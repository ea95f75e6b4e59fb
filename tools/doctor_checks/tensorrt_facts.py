"""Which TensorRT can be used, and whether CUDA's bindings are there."""

from dataclasses import dataclass
from importlib import import_module

from trtllm_lite.runtime.engines.trt_module import (
    Importer,
    NoTensorRTError,
    installed_tensorrt,
    require_tensorrt,
)
from trtllm_lite.tools.doctor_checks.packages import installed


@dataclass(frozen=True)
class FoundTensorRt:
    """`builds_for`: the GPUs that it names ("sm89"); empty where it builds for the one it is on."""

    name: str
    version: str
    builds_for: tuple[str, ...]

    def runs_on(self, sm: str) -> bool:
        return not self.builds_for or sm in self.builds_for


@dataclass(frozen=True)
class TensorRt:
    """In the order of preference. `problem` is empty where there is one. `cuda_bindings` is the
    version of that package, which every one of them needs."""

    found: tuple[FoundTensorRt, ...] = ()
    cuda_bindings: str = ""
    problem: str = ""

    def for_gpu(self, sm: str) -> FoundTensorRt | None:
        """The first that has kernels for a GPU."""
        return next((trt for trt in self.found if trt.runs_on(sm)), None)


def read_tensorrt(importer: Importer = import_module) -> TensorRt:
    """Import what is installed. Never raises."""
    bindings = installed("cuda-bindings")
    found = tuple(
        FoundTensorRt(trt.flavour, trt.version, trt.nameable_gpus)
        for trt in installed_tensorrt(importer)
    )
    if found:
        return TensorRt(found, bindings)
    try:
        require_tensorrt((), None, importer)
    except NoTensorRTError as error:
        return TensorRt(cuda_bindings=bindings, problem=str(error))
    return TensorRt(cuda_bindings=bindings, problem="none can be used")
