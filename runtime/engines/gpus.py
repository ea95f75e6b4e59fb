"""Names of GPUs, and the GPU of this machine as its driver tells it.

A GPU is named by its compute capability: "sm89" for 8.9.
"""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.errors import UsageError

CURRENT = "current"
_NAME = re.compile(r"sm[0-9]{2,3}")
# CUdevice_attribute of the CUDA driver API.
_MAJOR, _MINOR = 75, 76
_DRIVER_LIBRARY = "libcuda.so.1"
_DRIVER_VERSION = re.compile(r"Kernel Module\s+(?:for \S+\s+)?([0-9][0-9.]+)")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """The first GPU that this process sees. driver: the version of the kernel module, else that of
    CUDA which the driver has."""

    name: str
    driver: str


def parse_gpus(text: str, here: Gpu | None) -> tuple[str, ...]:
    """ "sm89,sm86" or "current" -> names in ascending order, each once. Raises UsageError."""
    names = [CURRENT if part == CURRENT else part for part in text.lower().split(",")]
    if CURRENT in names and here is None:
        raise UsageError(
            f"--gpu {CURRENT}: no NVIDIA GPU is seen here; name what to build for, such as "
            "--gpu sm86,sm89,sm120"
        )
    made = {here.name if name == CURRENT and here else name for name in names}
    for name in made:
        if not _NAME.fullmatch(name):
            allowed = f"{CURRENT}, or compute capabilities such as sm89, separated by commas"
            raise UsageError(f"--gpu: got {name!r}; allowed: {allowed}")
    return tuple(sorted(made, key=lambda name: int(name[2:])))


def current_gpu(open_library: Callable[[str], Any] = ctypes.CDLL) -> Gpu | None:
    """None where there is no driver, or no GPU that it lets this process see."""
    try:
        cuda = open_library(_DRIVER_LIBRARY)
    except OSError:
        return None
    count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    for attribute, value in ((_MAJOR, major), (_MINOR, minor)):
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0):
            return None
    return Gpu(f"sm{major.value}{minor.value}", _driver_version(cuda))


def _driver_version(cuda: Any) -> str:
    try:
        match = _DRIVER_VERSION.search(_DRIVER_FILE.read_text())
    except OSError:
        match = None
    if match is not None:
        return match[1]
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return f"cuda-{version.value // 1000}.{version.value % 1000 // 10}"
