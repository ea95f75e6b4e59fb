"""The GPUs that `plan` and `bench` speak of: named ones of the table, or that of this machine."""

from dataclasses import replace

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.planning.gpus import Gpu, find_gpu, read_gpus
from trtllm_lite.tools.doctor_checks import gpu_facts

ALL, CURRENT = "all", "current"


def named_gpus(names: str | None) -> tuple[Gpu, ...]:
    """Those of a list of names separated by commas; "all" is the whole table, "current" the GPU of
    this machine. Raises UsageError."""
    if names is None:
        return ()
    if names.strip().lower() == ALL:
        return read_gpus()
    found = (_named(name) for name in names.split(","))
    return tuple({gpu.name: gpu for gpu in found}.values())


def gpu_here() -> Gpu:
    """The first GPU that the driver shows, with the memory that it has according to it. Raises
    UsageError where there is none, or none of the table."""
    facts = gpu_facts.read_gpus()
    if not facts.gpus:
        raise UsageError(
            f"--gpu {CURRENT}: no NVIDIA GPU is seen here ({facts.problem}); name one, or all"
        )
    first = facts.gpus[0]
    gpu = find_gpu(first.name)
    source = f"{gpu.source}; memory as the driver says"
    return replace(gpu, memory_bytes=first.memory_bytes, source=source)


def _named(name: str) -> Gpu:
    return gpu_here() if name.strip().lower() == CURRENT else find_gpu(name)
