"""What doctor reads of a machine, from drawn ones."""

import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.tools.doctor_checks import host_facts
from trtllm_lite.tools.doctor_checks.gpu_facts import Gpu, read_gpus
from trtllm_lite.tools.doctor_checks.host_facts import read_host
from trtllm_lite.tools.doctor_checks.packages import (
    OnnxRuntime,
    read_onnxruntime,
    read_packages,
)
from trtllm_lite.tools.doctor_checks.ranges import wanted_ranges
from trtllm_lite.tools.doctor_checks.tensorrt_facts import FoundTensorRt, read_tensorrt

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
    module = SimpleNamespace(
        __version__=version,
        __file__=str(OWN / "__init__.py"),
        get_available_providers=lambda: list(providers),
    )
    return lambda name: module


OWN = Path("/site/onnxruntime")


def raising(error: Exception) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        raise error

    return load


def test_packages() -> None:
    found = {p.name: p.version for p in read_packages(versions(numpy="2.4", torch="2.13+cpu"))}
    assert (found["numpy"], found["torch"], found["onnxruntime"]) == ("2.4", "2.13+cpu", "")
    assert found["python"].startswith("3.")


def test_packages_of_other_versions_are_named() -> None:
    ranges = wanted_ranges(lambda _: ["torch>=2.13; extra == 'export'", "ray[serve]<2.61,>=2.60"])
    found = {p.name: p for p in read_packages(versions(torch="2.11.0+cu130", ray="2.60.0"), ranges)}
    assert found["torch"].problem == "trtllm-lite asks for >=2.13"
    assert found["ray"].problem == ""
    assert not ranges["ray"].holds("2.61")
    assert ranges["torch"].holds("2.13.0+cpu")
    renamed = {p.name: p for p in read_packages(versions(tensorrt_cu13="11.4.0"), {})}
    assert renamed["tensorrt"].version == "11.4.0"


def test_what_this_package_asks_for_is_understood() -> None:
    """Every bound of its own metadata, and every package that it names."""
    ranges = wanted_ranges()
    assert {"numpy", "torch", "transformers", "onnxruntime-gpu"} <= ranges.keys()
    for found in ranges.values():
        bounds = [bound for bound in (found.least, found.below) if bound is not None]
        assert len(bounds) == len(found.words.split(",")), found.words

    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    assert wanted_ranges(missing) == {}


def test_onnxruntime() -> None:
    def here(name: str) -> Path:
        return OWN

    found = read_onnxruntime(loaded("1.32.0", "CPU"), versions(onnxruntime="1.32.0"), here)
    assert found == OnnxRuntime("1.32.0", ("onnxruntime",), ("CPU",))
    both = versions(onnxruntime="1.32.0", onnxruntime_gpu="1.31.1")
    assert "keep one" in read_onnxruntime(loaded("1.31.1"), both, here).problem
    apart = {"onnxruntime": Path("/base/onnxruntime"), "onnxruntime-gpu": OWN}
    behind = read_onnxruntime(loaded("1.31.1"), both, apart.__getitem__)
    assert (behind.problem, behind.flavours) == ("", ("onnxruntime-gpu",))
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
