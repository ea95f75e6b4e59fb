"""What doctor says would run a bundle, and what to install, of drawn machines."""

from dataclasses import replace
from typing import Any

import pytest

from trtllm_lite.tools.doctor_checks.choices import Choice, Machine, choices
from trtllm_lite.tools.doctor_checks.gpu_facts import Gpu, GpuFacts
from trtllm_lite.tools.doctor_checks.host_facts import HostFacts
from trtllm_lite.tools.doctor_checks.packages import OnnxRuntime
from trtllm_lite.tools.doctor_checks.tensorrt_facts import FoundTensorRt, TensorRt

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
            ("pip uninstall -y onnxruntime", "pip install -U 'trtllm-lite[gpu]'"),
        ),
        (
            {"ort": replace(GPU_ORT, version="1.31.1")},
            "cpu",
            "older than 1.32",
            ("pip uninstall -y onnxruntime-gpu", "pip install -U 'trtllm-lite[cpu]'"),
        ),
        (
            {"ort": replace(GPU_ORT, cuda_problem="libcudnn.so.9: cannot open")},
            "cuda",
            "libcudnn.so.9: cannot open",
            ("pip install 'trtllm-lite[gpu]'",),
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
            ("pip install 'trtllm-lite[tensorrt]'",),
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
    extras = {"cpu": "cpu", "cuda": "gpu"}
    for choice in choices(replace(FULL, ort=both))[:2]:
        assert choice.ready
        assert choice.reason.endswith("; keep one")
        assert choice.install == (
            "pip uninstall -y onnxruntime onnxruntime-gpu",
            f"pip install -U 'trtllm-lite[{extras[choice.target]}]'",
        )


def test_rtx_is_for_the_gpus_that_it_names() -> None:
    choice = chosen(replace(FULL, tensorrt=RTX, gpu=L4), "tensorrt")
    assert (choice.on_gpu, choice.runs_on) == (True, "tensorrt_rtx 1.7.1 on NVIDIA L4")


def test_the_cpu_without_native_kernels_says_why() -> None:
    host = replace(HOST, kernels="", kernels_reason="no AVX-512 VNNI")
    choice = chosen(replace(FULL, host=host), "cpu")
    assert (choice.ready, choice.reason) == (True, "no native kernels: no AVX-512 VNNI")
