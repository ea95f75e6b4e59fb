"""The machines that `plan` looks at: GPUs of the table at their limits, or this CPU as measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.native_table import Rounding
from trtllm_lite.runtime.planning.cpu import (
    NATIVE,
    NATIVE_EXACT,
    ORT_FLOAT,
    ORT_INTEGER,
    Cpu,
    Kernels,
)
from trtllm_lite.runtime.planning.gpus import Gpu
from trtllm_lite.runtime.planning.memory import CONTEXT_BYTES, HOST_BYTES
from trtllm_lite.runtime.planning.roofline import Machine, Roofline
from trtllm_lite.runtime.planning.workload import Workload
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.tools.plan_subject import Subject

PROCESS_BYTES = 150 * 2**20
"""Estimate: Python, ONNX Runtime and the tokenizer on a CPU."""
FIRST_SM_OF = {"fp8": 89, "int4": 80}
"""What TensorRT builds weights of these formats for, as its builder says."""


@dataclass(frozen=True)
class Host:
    """A machine and what it runs. rates: what its times are worked out from, by name. is_limit:
    times are the least that are possible; else they are what is to be expected."""

    name: str
    title: str
    machine: Machine
    workload: Workload
    total_bytes: int
    reserved_bytes: int
    rates: Mapping[str, float]
    source: str
    is_limit: bool


def gpu_hosts(gpus: tuple[Gpu, ...], subject: Subject) -> list[Host]:
    """Those GPUs that can run it. Raises UsageError when none can, with the reason of the first."""
    reasons = {gpu.name: _why_not(gpu, subject) for gpu in gpus}
    fit = [gpu for gpu in gpus if not reasons[gpu.name]]
    if not fit:
        raise UsageError(f"--gpu {gpus[0].name}: {reasons[gpus[0].name]}")
    return [_gpu_host(gpu, subject) for gpu in fit]


def refusals(gpus: tuple[Gpu, ...], subject: Subject) -> dict[str, str]:
    """Why GPUs cannot run it, by name; without those that can."""
    reasons = {gpu.name: _why_not(gpu, subject) for gpu in gpus}
    return {name: reason for name, reason in reasons.items() if reason}


def _why_not(gpu: Gpu, subject: Subject) -> str:
    if subject.dtype not in gpu.flops:
        return f"{gpu.title} does not compute in {subject.dtype}; it has {', '.join(gpu.flops)}"
    for kind, first in FIRST_SM_OF.items() if subject.target == "tensorrt" else ():
        if subject.quantize.startswith(kind) and gpu.sm < first:
            return (
                f"TensorRT builds {kind} weights from SM {first} on; {gpu.title} is SM {gpu.sm}; "
                "quantize in another way"
            )
    return ""


def _gpu_host(gpu: Gpu, subject: Subject) -> Host:
    multiply = gpu.flops[subject.dtype]
    return Host(
        name=gpu.name,
        title=gpu.title,
        machine=Roofline(gpu.bandwidth, multiply),
        workload=subject.workload,
        total_bytes=gpu.memory_bytes,
        reserved_bytes=HOST_BYTES if gpu.unified else CONTEXT_BYTES,
        rates={"bytes_per_second": gpu.bandwidth, "flops": multiply, "sm": gpu.sm},
        source=gpu.source,
        is_limit=True,
    )


def cpu_host(subject: Subject, threads: int | None, rounding: Rounding, progress: Progress) -> Host:
    """This machine, its rates measured now. Raises UsageError where too little memory is free to
    measure, and for a rounding that its kernels do not have."""
    from trtllm_lite.runtime.host import available_memory, physical_cores
    from trtllm_lite.tools.bandwidth import product_rate, typical_bandwidth
    from trtllm_lite.tools.bench_report import machine

    kernels = kernels_for(subject.native is not None, subject.quantize, rounding)
    used = threads or physical_cores()
    available = available_memory()
    progress.step("measure this machine")
    memory = typical_bandwidth(used, available)
    if memory is None or available is None:
        raise UsageError("--gpu: too little memory is free to measure this CPU; name a GPU instead")
    cpu = Cpu(memory, product_rate(used), kernels)
    ours = subject.native if is_native(kernels) else None
    workload = ours or subject.workload
    return Host(
        name="cpu",
        title=f"{machine()['cpu']}, {used} threads",
        machine=cpu,
        workload=workload,
        total_bytes=available,
        reserved_bytes=PROCESS_BYTES,
        rates={"bytes_per_second": memory, "flops": cpu.products},
        source="measured now",
        is_limit=False,
    )


def kernels_for(has_native: bool, quantize: str, rounding: Rounding = "fast") -> Kernels:
    """Our own where there are graphs for them and this processor has what they need. Raises
    UsageError for exact rounding by others."""
    from trtllm_lite.runtime.kernels import find_kernels

    if has_native and find_kernels().library is not None:
        return NATIVE_EXACT if rounding == "exact" else NATIVE
    if rounding == "exact":
        raise UsageError(
            "--rounding exact: only the native kernels round so, and they do not run this model "
            "here; leave it out, or quantize to int8 or int4"
        )
    return ORT_FLOAT if quantize == "none" else ORT_INTEGER


def is_native(kernels: Kernels) -> bool:
    """Whether they are our own."""
    return kernels in (NATIVE, NATIVE_EXACT)
