"""The packages that matter, their versions, and which of them can be used together."""

import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.backends.cuda_libraries import (
    missing_cuda_library,
    preload_cuda_libraries,
)
from trtllm_lite.tools.doctor_checks.ranges import OWN, Range, wanted_ranges

CUDA_PROVIDER = "CUDAExecutionProvider"
PACKAGES = (
    *("numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "cuda-bindings"),
    *("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "safetensors", "gguf"),
    *("ml-dtypes", "huggingface-hub", "tokenizers", "llguidance", "starlette", "uvicorn", "ray"),
)
OTHER_NAMES = {
    "tensorrt": ("tensorrt-cu12", "tensorrt-cu13"),
    "tensorrt-rtx": ("tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
}
"""Packages that bring the same module as one of those."""

OTHER_FLAVOURS = ("onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-rocm")

Version = Callable[[str], str]
Place = Callable[[str], Path]
"""The folder of the module `onnxruntime` that a package brings."""


@dataclass(frozen=True)
class Package:
    """`version` is empty for a package that is not installed. `problem`: that trtllm-lite asks for
    another one."""

    name: str
    version: str
    problem: str = ""


@dataclass(frozen=True)
class OnnxRuntime:
    """What `import onnxruntime` gives.

    flavours: the packages whose module it is; several overwrite each other's files. problem: why it
    does not load, or that there are several. cuda_problem: the library that its CUDA
    provider does not find.
    """

    version: str = ""
    flavours: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    problem: str = ""
    cuda_problem: str = ""


def read_packages(
    version_of: Version = importlib.metadata.version, ranges: Mapping[str, Range] | None = None
) -> tuple[Package, ...]:
    """Python first, then the packages, installed or not."""
    python = ".".join(map(str, sys.version_info[:3]))
    rows = [Package("python", python), Package(OWN, installed(OWN, version_of))]
    ranges = wanted_ranges() if ranges is None else ranges
    return (*rows, *(_package(name, version_of, ranges.get(name)) for name in PACKAGES))


def _package(name: str, version_of: Version, wanted: Range | None) -> Package:
    names = (name, *OTHER_NAMES.get(name, ()))
    version = next((v for v in (installed(n, version_of) for n in names) if v), "")
    if wanted is None or not version or wanted.holds(version):
        return Package(name, version)
    return Package(name, version, f"{OWN} asks for {wanted.words}")


def installed(name: str, version_of: Version = importlib.metadata.version) -> str:
    """The version of a package; empty when it is not installed."""
    try:
        return version_of(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_onnxruntime(
    load: Callable[[str], Any] = import_module,
    version_of: Version = importlib.metadata.version,
    place_of: Place | None = None,
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
    flavours = _owners(module, flavours, place_of or _place)
    said = ""
    if len(flavours) > 1:
        said = f"{' and '.join(flavours)} are both installed and share one module: keep one"
    return OnnxRuntime(version, flavours, providers, said, _cuda_problem(module, providers))


def _place(name: str) -> Path:
    return Path(str(importlib.metadata.distribution(name).locate_file("onnxruntime"))).resolve()


def _owners(module: Any, names: tuple[str, ...], place_of: Place) -> tuple[str, ...]:
    """Those in whose folder the module is: one that lies elsewhere is out of the way."""
    own = Path(module.__file__).parent.resolve()
    return tuple(name for name in names if place_of(name) == own)


def _cuda_problem(module: Any, providers: tuple[str, ...]) -> str:
    if CUDA_PROVIDER not in providers:
        return ""
    preload_cuda_libraries(module)
    return missing_cuda_library(module)
