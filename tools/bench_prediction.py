"""What `bench` says beside what it measures: times worked out from this machine's rates."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from trtllm_lite.runtime.planning.cpu import NATIVE, Cpu
from trtllm_lite.runtime.planning.together import Prediction, predict
from trtllm_lite.tools.bandwidth import product_rate, typical_bandwidth
from trtllm_lite.tools.bench_run import Point
from trtllm_lite.tools.plan_bundle import bundle_workloads
from trtllm_lite.tools.plan_machines import kernels_for

if TYPE_CHECKING:
    from trtllm_lite.runtime.bundle import Bundle


def predictions(
    bundle: "Bundle",
    points: Iterable[Point],
    threads: int,
    available: int | None,
    kernels: str,
    kv_dtype: str,
) -> dict[Point, Prediction]:
    """Of each point of the grid; none where the machine's rate is not known, or for a bundle that
    does not run on a CPU. kernels, kv_dtype: as the engine was asked to have them."""
    memory = typical_bandwidth(threads, available)
    if memory is None or bundle.manifest.target != "cpu":
        return {}
    plain, native = bundle_workloads(bundle)
    ours = native if kernels != "onnxruntime" else None
    found = kernels_for(ours is not None, bundle.manifest.quantization.decode)
    workload = ours if ours is not None and found is NATIVE else plain
    if workload is ours and kv_dtype != "auto":
        workload = replace(workload, kv_dtype=kv_dtype)
    cpu = Cpu(memory, product_rate(threads), found)
    return {p: predict(workload, cpu, p.concurrency, p.input_len, p.output_len) for p in points}
