"""The NVIDIA driver and its GPUs: asked through the management library, else through nvidia-smi.

NVML: https://docs.nvidia.com/deploy/nvml-api/ (nvmlInit_v2, nvmlDeviceGetCudaComputeCapability and
those beside them). Neither makes a CUDA context, so nothing on a GPU changes.
"""

import csv
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NVML_LIBRARY = "libnvidia-ml.so.1"
SMI = "nvidia-smi"
SMI_FIELDS = ("name", "compute_cap", "memory.total", "memory.free", "driver_version")
SMI_TIMEOUT_S = 30.0
NAME_BYTES = 96
MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """One GPU. `sm`: its compute capability as the build command writes it, "sm90"."""

    index: int
    name: str
    sm: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class GpuFacts:
    """`driver` and `cuda` (the newest CUDA that the driver runs) are empty where nobody says.
    `problem` says why there are no GPUs; it is empty where there are some."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: str = ""
    source: str = ""
    problem: str = ""


class NvmlError(Exception):
    """A call of the management library failed."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Nvml:
    """The management library's calls, their codes as exceptions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvmlErrorString.restype = ctypes.c_char_p

    @contextmanager
    def opened(self) -> Iterator["Nvml"]:
        self._call("nvmlInit_v2")
        try:
            yield self
        finally:
            self._library.nvmlShutdown()

    def facts(self) -> GpuFacts:
        version = ctypes.c_int()
        self._call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return GpuFacts(
            gpus=tuple(self._gpu(index) for index in range(count.value)),
            driver=self._text("nvmlSystemGetDriverVersion"),
            cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
            source=NVML_LIBRARY,
            problem="" if count.value else "the driver sees no GPU",
        )

    def _gpu(self, index: int) -> Gpu:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        numbers = (ctypes.byref(major), ctypes.byref(minor))
        self._call("nvmlDeviceGetCudaComputeCapability", handle, *numbers)
        name, sm = self._text("nvmlDeviceGetName", handle), f"sm{major.value}{minor.value}"
        return Gpu(index, name, sm, memory.total, memory.free)

    def _text(self, function: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(NAME_BYTES)
        self._call(function, *arguments, buffer, ctypes.c_uint(NAME_BYTES))
        return buffer.value.decode(errors="replace")

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise NvmlError(f"{NVML_LIBRARY} has no {function}: the driver is too old") from None
        if code:
            said = self._library.nvmlErrorString(code).decode(errors="replace")
            raise NvmlError(f"{function}: {said}")


def read_gpus(library: str = NVML_LIBRARY, smi: str = SMI, root: Path = Path("/")) -> GpuFacts:
    """What the driver says of its GPUs. Never raises: `problem` says what was wrong."""
    try:
        with Nvml(ctypes.CDLL(library)).opened() as nvml:
            return nvml.facts()
    except NvmlError as error:
        problem = str(error)
    except OSError:
        problem = ""
    found = shutil.which(smi)
    if found is not None:
        return _from_smi(found)
    return GpuFacts(problem=problem or _why_none(library, smi, root))


def _why_none(library: str, smi: str, root: Path) -> str:
    if (root / "proc/driver/nvidia/version").exists():
        return (
            f"the NVIDIA driver is loaded, but its libraries are not here ({library}): "
            "start the container with its GPUs, as `docker run --gpus all` does"
        )
    return f"no NVIDIA driver: neither {library} nor {smi} is here"


def _from_smi(program: str) -> GpuFacts:
    """One line a GPU: https://docs.nvidia.com/deploy/nvidia-smi/ (--query-gpu)."""
    query = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return GpuFacts(problem=f"{SMI}: {error}")
    if done.returncode:
        said = (done.stdout + done.stderr).split("\n", 1)[0]
        return GpuFacts(problem=f"{SMI} ended with code {done.returncode}: {said}")
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())]
        gpus = tuple(_smi_gpu(index, row) for index, row in enumerate(rows))
    except (ValueError, IndexError):
        return GpuFacts(problem=f"{SMI} said what nobody expects: {done.stdout[:80]!r}")
    driver = rows[0][4] if rows else ""
    problem = "" if gpus else "the driver sees no GPU"
    return GpuFacts(gpus, driver, source=SMI, problem=problem)


def _smi_gpu(index: int, row: list[str]) -> Gpu:
    name, capability, total, free, _ = row
    major, minor = capability.split(".")
    sm = f"sm{int(major)}{int(minor)}"
    return Gpu(index, name, sm, int(total) * MIB, int(free) * MIB)
