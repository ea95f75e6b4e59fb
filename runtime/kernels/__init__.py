"""The native kernels: C++ operators for ONNX Runtime's CPU provider, compiled at installation.

They are optional. Where there was no compiler, on another processor than x86-64 with AVX-512 VNNI,
or under another system than Linux, `find_kernels` says why not, and bundles run on ONNX Runtime's
own operators.
"""

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trtllm_lite.runtime.native_table import VERSION

LIBRARY = "trtllm_lite_kernels"


@dataclass(frozen=True)
class Kernels:
    """`library` can be registered with a session; when it is None, `reason` says why."""

    library: Path | None
    reason: str = ""


@cache
def find_kernels() -> Kernels:
    """The compiled library that belongs to this version and runs on this processor."""
    folder = Path(__file__).parent
    found = sorted(folder.glob(f"{LIBRARY}*.so"))
    if not found:
        return Kernels(None, _why_absent())
    try:
        library = ctypes.CDLL(str(found[0]))
        version = library.trtllm_lite_kernels_version()
        supported = library.trtllm_lite_kernels_supported()
    except (OSError, AttributeError) as error:
        return Kernels(None, f"{found[0].name} cannot be loaded: {error}")
    if version != VERSION:
        return Kernels(None, f"{found[0].name} has version {version}; needed: {VERSION}; reinstall")
    if not supported:
        return Kernels(None, "this processor has no AVX-512 VNNI")
    return Kernels(found[0])


def _why_absent() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"there are none for {sys.platform} on {platform.machine()}"
    return "they were not compiled; install g++ and reinstall the package"
