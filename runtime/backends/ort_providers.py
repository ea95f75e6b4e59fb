"""ONNX Runtime's two providers that build TensorRT engines by themselves: how they are called, what
they are told, and what to install for them.

Names and values of options are those of onnxruntime-gpu 1.31 and of onnxruntime-ep-nv-tensorrt-rtx
0.5, which refuse others. Sources: ONNX Runtime, "TensorRT Execution Provider" and "NVIDIA
TensorRT RTX Execution Provider"; the latter package's `tensorrt_rtx_provider_options.h`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from trtllm_lite.runtime.errors import UsageError

ProviderChoice = Literal["auto", "tensorrt", "nv-tensorrt-rtx"]
"""A provider by name, or whatever a backend is made for."""

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
TENSORRT, RTX = "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"
RTX_MODULE = "onnxruntime_ep_nv_tensorrt_rtx"
INSTALL_TENSORRT = (
    "install onnxruntime-gpu and the libraries of TensorRT 10: pip install onnxruntime-gpu "
    "'tensorrt-cu13==10.*', and see that the loader finds them (LD_LIBRARY_PATH)"
)
INSTALL_RTX = "pip install onnxruntime-gpu onnxruntime-ep-nv-tensorrt-rtx"


@dataclass(frozen=True)
class ProfileShapes:
    """Least, usual and largest shapes of a graph's inputs, as the providers read them:
    "input_ids:1x1,past_lens:1"."""

    least: str
    usual: str
    most: str


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built and run with. `stream`: a CUDA stream's handle; `folder`: where
    engines are kept for the next time, None for nowhere."""

    stream: int
    shapes: ProfileShapes
    folder: Path | None


@dataclass(frozen=True)
class Provider:
    """One of the two. `version`: of what builds the engines, as far as it says; `session`: makes an
    inference session on it from a graph's path, with the SessionOptions that are given."""

    name: str
    version: str
    install: str
    session: Callable[[str, Any, EngineSettings], Any]


def find_provider(ort: Any, choice: ProviderChoice) -> Provider:
    """The provider of that name. Raises UsageError, with what to install, where it is not there."""
    return _tensorrt(ort) if choice == "tensorrt" else _rtx(ort)


def tensorrt_options(settings: EngineSettings) -> dict[str, str]:
    """Of the TensorRT provider. Engines are strongly typed where no precision is asked for, so none
    is. Booleans are words here."""
    options = {
        "device_id": "0",
        "user_compute_stream": str(settings.stream),
        "trt_profile_min_shapes": settings.shapes.least,
        "trt_profile_opt_shapes": settings.shapes.usual,
        "trt_profile_max_shapes": settings.shapes.most,
    }
    if settings.folder is not None:
        options |= {
            "trt_engine_cache_enable": "True",
            "trt_engine_cache_path": str(settings.folder),
        }
    return options


def rtx_options(settings: EngineSettings) -> dict[str, str]:
    """Of the NvTensorRtRtx provider."""
    options = {
        "has_user_compute_stream": "1",
        "user_compute_stream": str(settings.stream),
        "nv_profile_min_shapes": settings.shapes.least,
        "nv_profile_opt_shapes": settings.shapes.usual,
        "nv_profile_max_shapes": settings.shapes.most,
    }
    if settings.folder is not None:
        options["nv_runtime_cache_path"] = str(settings.folder)
    return options


def _tensorrt(ort: Any) -> Provider:
    if TENSORRT not in ort.get_available_providers():
        raise UsageError(
            f"provider: got 'tensorrt'; this onnxruntime does not have it; {INSTALL_TENSORRT}"
        )

    def session(path: str, given: Any, settings: EngineSettings) -> Any:
        stream: Mapping[str, str] = {"user_compute_stream": str(settings.stream)}
        providers = [(TENSORRT, tensorrt_options(settings)), (CUDA, stream), CPU]
        # Without fallback: ONNX Runtime would say so on stdout, and go on without the provider.
        return ort.InferenceSession(path, given, providers=providers, enable_fallback=0)

    return Provider(TENSORRT, str(ort.__version__), INSTALL_TENSORRT, session)


def _rtx(ort: Any) -> Provider:
    try:
        module = import_module(RTX_MODULE)
    except ImportError as error:
        text = "its package is not installed"
        raise UsageError(f"provider: got 'nv-tensorrt-rtx'; {text}; {INSTALL_RTX}") from error
    devices = _rtx_devices(ort, module)

    def session(path: str, given: Any, settings: EngineSettings) -> Any:
        given.add_provider_for_devices(devices, rtx_options(settings))
        return ort.InferenceSession(path, given, enable_fallback=0)

    version = f"{ort.__version__}, {module.__version__}"
    return Provider(RTX, version, INSTALL_RTX, session)


def _rtx_devices(ort: Any, module: Any) -> list[Any]:
    """The first GPU that the provider takes, alone. A process registers it once."""
    if not (found := _devices_of(ort, RTX)):
        try:
            ort.register_execution_provider_library(module.get_ep_name(), module.get_library_path())
        except Exception as error:
            said = " ".join(str(error).split())
            raise UsageError(
                f"provider: got 'nv-tensorrt-rtx'; it cannot be loaded: {said}; {INSTALL_RTX}"
            ) from error
        found = _devices_of(ort, RTX)
    if not found:
        raise UsageError(
            "provider: got 'nv-tensorrt-rtx'; it finds no GPU that it runs on: it needs an NVIDIA "
            "RTX GPU from compute capability 8.6 on and a driver for CUDA 13"
        )
    return found[:1]


def _devices_of(ort: Any, name: str) -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == name]
