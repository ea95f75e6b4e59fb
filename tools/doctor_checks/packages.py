"""The packages that matter, their versions, and which of them can be used together."""

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from trtllm_lite.runtime.backends.cuda_libraries import (
    missing_cuda_library,
    preload_cuda_libraries,
)

CUDA_PROVIDER = "CUDAExecutionProvider"
PACKAGES = (
    *("numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "cuda-bindings"),
    *("torch", "transformers", "onnx", "onnxscript", "tokenizers", "llguidance", "starlette"),
    *("uvicorn", "ray"),
)
TENSORRT_NAMES = ("tensorrt", "tensorrt-cu12", "tensorrt-cu13")
"""Packages that bring the module `tensorrt`."""

RTX_NAMES = ("tensorrt-rtx", "tensorrt_rtx_cu13")
OTHER_FLAVOURS = ("onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-rocm")

Version = Callable[[str], str]


@dataclass(frozen=True)
class Package:
    """`version` is empty for a package that is not installed."""

    name: str
    version: str


@dataclass(frozen=True)
class OnnxRuntime:
    """What `import onnxruntime` gives.

    flavours: the packages that claim the module; several overwrite each other's files. problem:
    why it does not load, or that there are several. cuda_problem: the library that its CUDA
    provider does not find.
    """

    version: str = ""
    flavours: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    problem: str = ""
    cuda_problem: str = ""


def read_packages(version_of: Version = importlib.metadata.version) -> tuple[Package, ...]:
    """Python first, then the packages, installed or not."""
    python = ".".join(map(str, sys.version_info[:3]))
    rows = [Package("python", python), Package("trtllm-lite", installed("trtllm-lite", version_of))]
    return (*rows, *(Package(name, installed(name, version_of)) for name in PACKAGES))


def installed(name: str, version_of: Version = importlib.metadata.version) -> str:
    """The version of a package; empty when it is not installed."""
    try:
        return version_of(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_onnxruntime(
    load: Callable[[str], Any] = import_module,
    version_of: Version = importlib.metadata.version,
) -> OnnxRuntime:
    """Import ONNX Runtime and ask for its providers. Never raises."""
    names = ("onnxruntime", "onnxruntime-gpu", *OTHER_FLAVOURS)
    flavours = tuple(name for name in names if installed(name, version_of))
    try:
        module = load("onnxruntime")
        version, providers = str(module.__version__), tuple(module.get_available_providers())
    except ModuleNotFoundError as error:
        if error.name == "onnxruntime":
            return OnnxRuntime(flavours=flavours, problem="it is not installed")
        return OnnxRuntime(flavours=flavours, problem=f"cannot be imported: {error}")
    except (ImportError, OSError, AttributeError) as error:
        return OnnxRuntime(flavours=flavours, problem=f"cannot be imported: {error}")
    said = ""
    if len(flavours) > 1:
        said = f"{' and '.join(flavours)} are both installed and share one module: keep one"
    return OnnxRuntime(version, flavours, providers, said, _cuda_problem(module, providers))


def _cuda_problem(module: Any, providers: tuple[str, ...]) -> str:
    if CUDA_PROVIDER not in providers:
        return ""
    preload_cuda_libraries(module)
    return missing_cuda_library(module)
