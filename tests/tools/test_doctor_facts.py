"""What doctor reads of a machine, from drawn ones."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.tools.doctor_checks import host_facts
from trtllm_lite.tools.doctor_checks.choices import Choice, Machine, choices
from trtllm_lite.tools.doctor_checks.gpu_facts import Gpu, GpuFacts, read_gpus
from trtllm_lite.tools.doctor_checks.host_facts import HostFacts, read_host
from trtllm_lite.tools.doctor_checks.packages import (
    OnnxRuntime,
    read_onnxruntime,
    read_packages,
)
from trtllm_lite.tools.doctor_checks.tensorrt_facts import FoundTensorRt, TensorRt, read_tensorrt

NVML = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "other"; }
int nvmlSystemGetDriverVersion(char *to, unsigned n) { strncpy(to, "580.82.07", n); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13020; return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = COUNT; return 0; }
static int places[2];
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = &places[i]; return 0; }
static int at(void *h) { return (int *)h - places; }
int nvmlDeviceGetName(void *h, char *to, unsigned n) {
  strncpy(to, at(h) ? "NVIDIA L4" : "NVIDIA H200", n); return 0;
}
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) {
  m->total = (at(h) ? 23ull : 140ull) << 30; m->free = 5ull << 30; m->used = 0; return 0;
}
#ifdef CAPABILITY
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
  *major = at(h) ? 8 : 9; *minor = at(h) ? 9 : 0; return 0;
}
#endif
"""
SMI = """#!/bin/sh
echo "NVIDIA GeForce RTX 5090, 12.0, 32607, 31000, 580.95.05"
"""


@pytest.fixture
def nvml(tmp_path: Path) -> Callable[..., str]:
    """Compiles a library with the management library's functions; returns its path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def make(init: int = 0, count: int = 2, capability: bool = True) -> str:
        source, library = tmp_path / "nvml.c", tmp_path / "libnvml.so"
        source.write_text(NVML)
        macros = [f"-DINIT={init}", f"-DCOUNT={count}", *["-DCAPABILITY"][:capability]]
        made = [compiler, "-shared", "-fPIC", *macros, "-o", str(library), str(source)]
        subprocess.run(made, check=True)
        return str(library)

    return make


def program(folder: Path, text: str) -> str:
    path = folder / "smi"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_gpus_from_the_management_library(nvml: Callable[..., str]) -> None:
    facts = read_gpus(library=nvml(), smi="no-such-program")
    assert facts.gpus == (
        Gpu(0, "NVIDIA H200", "sm90", 140 * 2**30, 5 * 2**30),
        Gpu(1, "NVIDIA L4", "sm89", 23 * 2**30, 5 * 2**30),
    )
    assert (facts.driver, facts.cuda, facts.problem) == ("580.82.07", "13.2", "")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"init": 9}, "nvmlInit_v2: Driver Not Loaded"),
        ({"count": 0}, "the driver sees no GPU"),
        ({"capability": False}, "no nvmlDeviceGetCudaComputeCapability: the driver is too old"),
    ],
)
def test_a_management_library_that_cannot_say(
    nvml: Callable[..., str], made: dict[str, Any], said: str
) -> None:
    facts = read_gpus(library=nvml(**made), smi="no-such-program")
    assert facts.gpus == ()
    assert said in facts.problem


def test_gpus_from_nvidia_smi(tmp_path: Path) -> None:
    facts = read_gpus(library="libno.so", smi=program(tmp_path, SMI))
    name = "NVIDIA GeForce RTX 5090"
    assert facts.gpus == (Gpu(0, name, "sm120", 32607 * 2**20, 31000 * 2**20),)
    assert (facts.driver, facts.source) == ("580.95.05", "nvidia-smi")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\necho 'Failed to initialize NVML'; exit 9\n", "code 9: Failed to initialize"),
        ("#!/bin/sh\necho what is this\n", "said what nobody expects"),
        ("#!/bin/sh\n", "the driver sees no GPU"),
    ],
)
def test_an_nvidia_smi_that_cannot_say(tmp_path: Path, text: str, said: str) -> None:
    facts = read_gpus(library="libno.so", smi=program(tmp_path, text))
    assert facts.gpus == ()
    assert said in facts.problem


def test_a_container_without_its_gpus(tmp_path: Path) -> None:
    facts = read_gpus("libno.so", "no-such-program", tmp_path)
    assert facts.problem == "no NVIDIA driver: neither libno.so nor no-such-program is here"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("x")
    assert "--gpus all" in read_gpus("libno.so", "no-such-program", tmp_path).problem


def test_a_drawn_host(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "model name : Some  CPU\nflags : avx2 sse avx512_vnni fma\n",
        "proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:  600 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    host = read_host(tmp_path)
    assert host.processor == "Some CPU"
    assert host.instruction_sets == ("avx2", "fma", "avx512_vnni")
    assert (host.memory_bytes, host.available_bytes) == (1000 * 1024, 600 * 1024)
    assert host.huge_pages == "madvise"
    empty = read_host(tmp_path / "none")
    assert (empty.memory_bytes, empty.huge_pages, empty.instruction_sets) == (None, "", ())


def test_this_host() -> None:
    host = read_host()
    assert host.cores >= 1
    assert bool(host.kernels) != bool(host.kernels_reason)


@pytest.mark.parametrize("writable", [True, False])
def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    folder = tmp_path / "cache" / "not" / "made"
    if not writable:
        (tmp_path / "cache").write_text("a file in the way")
    monkeypatch.setattr(host_facts, "user_cache_folder", lambda: folder)
    host = read_host()
    assert host.cache_folder == str(folder)
    assert host.cache_problem == ("" if writable else "cannot be written")
    assert not folder.exists()
    monkeypatch.setattr(host_facts, "user_cache_folder", lambda: None)
    assert read_host().cache_problem == "this user has no home folder"


def versions(**known: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        try:
            return known[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    return version


def loaded(version: str, *providers: str) -> Callable[[str], Any]:
    module = SimpleNamespace(__version__=version, get_available_providers=lambda: list(providers))
    return lambda name: module


def raising(error: Exception) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        raise error

    return load


def test_packages() -> None:
    found = {p.name: p.version for p in read_packages(versions(numpy="2.4", torch="2.13+cpu"))}
    assert (found["numpy"], found["torch"], found["onnxruntime"]) == ("2.4", "2.13+cpu", "")
    assert found["python"].startswith("3.")


def test_onnxruntime() -> None:
    found = read_onnxruntime(loaded("1.32.0", "CPU"), versions(onnxruntime="1.32.0"))
    assert found == OnnxRuntime("1.32.0", ("onnxruntime",), ("CPU",))
    both = versions(onnxruntime="1.32.0", onnxruntime_gpu="1.31.1")
    assert "keep one" in read_onnxruntime(loaded("1.31.1"), both).problem
    missing = ModuleNotFoundError("no", name="onnxruntime")
    assert read_onnxruntime(raising(missing), versions()).problem == "it is not installed"
    broken = read_onnxruntime(raising(ImportError("libcublas.so.13: cannot open")), versions())
    assert broken.problem == "cannot be imported: libcublas.so.13: cannot open"
    inner = read_onnxruntime(raising(ModuleNotFoundError("no numpy", name="numpy")), versions())
    assert inner.problem == "cannot be imported: no numpy"


def trt_module(version: str, *sms: str) -> Any:
    members = dict.fromkeys([*sms, "CURRENT"])
    kinds = SimpleNamespace(__members__=members)
    return SimpleNamespace(__version__=version, **({"ComputeCapability": kinds} if sms else {}))


def test_tensorrt() -> None:
    modules = {"tensorrt_rtx": trt_module("1.7.1", "SM120", "SM89")}

    def load(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(name, name=name)
        return modules[name]

    found = read_tensorrt(load)
    assert found.found == (FoundTensorRt("tensorrt_rtx", "1.7.1", ("sm89", "sm120")),)
    assert found.for_gpu("sm90") is None
    modules["tensorrt"] = trt_module("11.4.0.106")
    both = read_tensorrt(load)
    best = both.for_gpu("sm90")
    assert best is not None
    assert (best.name, best.version) == ("tensorrt", "11.4.0.106")
    nothing = read_tensorrt(raising(ImportError("libnvinfer.so.11: cannot open shared object")))
    assert nothing.found == ()
    assert "libnvinfer.so.11" in nothing.problem


HOST = HostFacts(
    system="Linux",
    processor="CPU",
    cores=4,
    instruction_sets=(),
    memory_bytes=None,
    available_bytes=None,
    huge_pages="",
    cache_folder="/c",
    cache_problem="",
    open_files=None,
    open_files_most=None,
    kernels="kernels.so",
    kernels_reason="",
)
CPU_ORT = OnnxRuntime("1.32.0", ("onnxruntime",), ("CPUExecutionProvider",))
GPU_ORT = OnnxRuntime("1.32.1", ("onnxruntime-gpu",), ("CUDAExecutionProvider",))
NO_ORT = OnnxRuntime(problem="it is not installed")
NATIVE = TensorRt((FoundTensorRt("tensorrt", "11.4.0", ()),), "13.0")
RTX = TensorRt((FoundTensorRt("tensorrt_rtx", "1.7.1", ("sm89", "sm120")),), "13.0")
NO_TRT = TensorRt(problem="no TensorRT to build with")
H200 = GpuFacts((Gpu(0, "NVIDIA H200", "sm90", 1, 1),), "580", "13.0", "nvml")
L4 = GpuFacts((Gpu(0, "NVIDIA L4", "sm89", 1, 1),), "580", "13.0", "nvml")
NO_GPU = GpuFacts(problem="no NVIDIA driver")
FULL = Machine(HOST, GPU_ORT, NATIVE, H200)


def chosen(machine: Machine, target: str) -> Choice:
    return next(choice for choice in choices(machine) if choice.target == target)


def test_a_machine_with_everything_runs_everything() -> None:
    assert [c.target for c in choices(FULL)] == ["cpu", "cuda", "tensorrt"]
    assert [c.ready for c in choices(FULL)] == [True, True, True]
    assert [c.on_gpu for c in choices(FULL)] == [False, True, True]
    assert chosen(FULL, "cuda").runs_on == "onnxruntime 1.32.1 on NVIDIA H200"
    assert chosen(FULL, "tensorrt").runs_on == "tensorrt 11.4.0 on NVIDIA H200"


@pytest.mark.parametrize(
    ("changes", "target", "reason", "install"),
    [
        ({"ort": NO_ORT}, "cpu", "not installed", ("pip install -U 'trtllm-lite[cpu]'",)),
        ({"ort": NO_ORT}, "cuda", "not installed", ("pip install -U 'trtllm-lite[gpu]'",)),
        (
            {"ort": replace(CPU_ORT, version="1.30.0")},
            "cpu",
            "older than 1.32",
            ("pip install -U 'trtllm-lite[cpu]'",),
        ),
        (
            {"ort": CPU_ORT},
            "cuda",
            "no CUDAExecutionProvider",
            ("pip uninstall onnxruntime", "pip install -U 'trtllm-lite[gpu]'"),
        ),
        (
            {"ort": replace(GPU_ORT, version="1.31.1")},
            "cpu",
            "older than 1.32",
            ("pip uninstall onnxruntime-gpu", "pip install -U 'trtllm-lite[cpu]'"),
        ),
        (
            {"ort": replace(GPU_ORT, cuda_problem="libcudnn.so.9: cannot open")},
            "cuda",
            "libcudnn.so.9: cannot open",
            ("pip install 'onnxruntime-gpu[cuda,cudnn]'",),
        ),
        (
            {"tensorrt": replace(NATIVE, cuda_bindings="")},
            "cuda",
            "cuda-bindings is not installed",
            ("pip install cuda-bindings",),
        ),
        ({"gpu": NO_GPU}, "cuda", "no NVIDIA driver", ()),
        ({"gpu": NO_GPU, "ort": NO_ORT}, "cuda", "no NVIDIA driver", ()),
    ],
)
def test_what_is_missing_comes_with_its_lines(
    changes: dict[str, Any], target: str, reason: str, install: tuple[str, ...]
) -> None:
    choice = chosen(replace(FULL, **changes), target)
    assert not choice.ready
    assert reason in choice.reason
    assert choice.install == install


@pytest.mark.parametrize(
    ("changes", "reason", "install"),
    [
        ({"gpu": NO_GPU}, "no NVIDIA driver", ()),
        ({"tensorrt": NO_TRT}, "no TensorRT to build with", ()),
        (
            {"tensorrt": RTX},
            "tensorrt_rtx 1.7.1 has no kernels for sm90",
            ("pip install tensorrt",),
        ),
        (
            {"tensorrt": replace(NATIVE, cuda_bindings="")},
            "cuda-bindings is not installed",
            ("pip install cuda-bindings",),
        ),
    ],
)
def test_without_tensorrt_its_bundles_run_slowly_on_the_cpu(
    changes: dict[str, Any], reason: str, install: tuple[str, ...]
) -> None:
    choice = chosen(replace(FULL, **changes), "tensorrt")
    assert (choice.ready, choice.on_gpu) == (True, False)
    assert choice.runs_on == "onnxruntime 1.32.1 on the CPU, slowly"
    assert (reason in choice.reason, choice.install) == (True, install)
    nothing = chosen(replace(FULL, ort=NO_ORT, **changes), "tensorrt")
    assert not nothing.ready
    assert nothing.install == (*install, "pip install -U 'trtllm-lite[cpu]'")


def test_two_flavours_are_a_warning() -> None:
    both = replace(GPU_ORT, flavours=("onnxruntime", "onnxruntime-gpu"), problem="keep one")
    for choice in choices(replace(FULL, ort=both))[:2]:
        assert choice.ready
        assert choice.reason.endswith("; keep one")


def test_rtx_is_for_the_gpus_that_it_names() -> None:
    choice = chosen(replace(FULL, tensorrt=RTX, gpu=L4), "tensorrt")
    assert (choice.on_gpu, choice.runs_on) == (True, "tensorrt_rtx 1.7.1 on NVIDIA L4")


def test_the_cpu_without_native_kernels_says_why() -> None:
    host = replace(HOST, kernels="", kernels_reason="no AVX-512 VNNI")
    choice = chosen(replace(FULL, host=host), "cpu")
    assert (choice.ready, choice.reason) == (True, "no native kernels: no AVX-512 VNNI")
