"""What `bench` says beside what it measures: times worked out from this machine's rates.

On a CPU they are what is to be expected; on a GPU they are the least that is possible.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.native_table import Rounding
from trtllm_lite.runtime.planning.cpu import Cpu
from trtllm_lite.runtime.planning.gpus import Gpu
from trtllm_lite.runtime.planning.roofline import Roofline
from trtllm_lite.runtime.planning.together import Prediction, predict
from trtllm_lite.tools.bandwidth import product_rate, typical_bandwidth
from trtllm_lite.tools.bench_run import Point
from trtllm_lite.tools.plan_bundle import bundle_workloads
from trtllm_lite.tools.plan_gpus import gpu_here
from trtllm_lite.tools.plan_machines import is_native, kernels_for

if TYPE_CHECKING:
    from trtllm_lite.runtime.bundle import Bundle


def predictions(
    bundle: "Bundle",
    points: Iterable[Point],
    threads: int,
    available: int | None,
    kernels: str,
    rounding: Rounding,
    kv_dtype: str,
) -> dict[Point, Prediction]:
    """Of each point of the grid; none where the machine's rate is not known, or for a bundle that
    does not run on a CPU. kernels, rounding, kv_dtype: as the engine was asked to have them."""
    memory = typical_bandwidth(threads, available)
    if memory is None or bundle.manifest.target != "cpu":
        return {}
    plain, native = bundle_workloads(bundle)
    ours = native if kernels != "onnxruntime" else None
    asked = "fast" if ours is None else rounding
    found = kernels_for(ours is not None, bundle.manifest.quantization.decode, asked)
    workload = ours if ours is not None and is_native(found) else plain
    if workload is ours and kv_dtype != "auto":
        workload = replace(workload, kv_dtype=kv_dtype)
    cpu = Cpu(memory, product_rate(threads), found)
    return {p: predict(workload, cpu, p.concurrency, p.input_len, p.output_len) for p in points}


def known_gpu() -> Gpu | None:
    """The GPU of this machine; None where the table has no figures of it."""
    try:
        return gpu_here()
    except UsageError:
        return None


def gpu_predictions(bundle: "Bundle", points: Iterable[Point], gpu: Gpu) -> dict[Point, Prediction]:
    """Of each point of the grid, the least that this GPU can take; none in a type that it does not
    compute in."""
    if bundle.manifest.dtype not in gpu.flops:
        return {}
    workload, _ = bundle_workloads(bundle)
    machine = Roofline(gpu.bandwidth, gpu.flops[bundle.manifest.dtype])
    return {p: predict(workload, machine, p.concurrency, p.input_len, p.output_len) for p in points}
