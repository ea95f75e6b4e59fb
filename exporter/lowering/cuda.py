"""The `cuda` target: ONNX Runtime's CUDA provider.

The same fused operators as for the `cpu` target, computed in float16 or bfloat16. What differs:

* GroupQueryAttention has no `query_seqlens` in the releases of onnxruntime-gpu so far, so rows of
  several tokens that continue from a cache run one by one (`runtime/manifest.py` has the contract);
* it reads the longest total length in host memory. As an input that nothing else reads it is bound
  there; computed in the graph it would have to be copied back in every step;
* positions are counted without asking for a shape, whose answer is in host memory as well;
* the largest logits come out by themselves, so that a step that needs no others copies no others.

So every node is computed on the device with nothing copied in between, which a CUDA graph needs.
Sources: ONNX Runtime, docs/ContribOperators.md and docs/OperatorKernels.md.
"""

from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from trtllm_lite.exporter.contract import BATCH, NUM_LOGITS
from trtllm_lite.exporter.cuda_placement import check_cuda_graph, check_cuda_model
from trtllm_lite.exporter.lowering.base import Passes, Target
from trtllm_lite.exporter.lowering.cpu import TARGET as CPU
from trtllm_lite.exporter.lowering.cpu import attention, passes
from trtllm_lite.exporter.passes import count_on_device, give_largest, take_longest
from trtllm_lite.runtime.manifest import GraphSpec, TensorSpec

CANDIDATES = 64
"""Of so many of the largest logits a step copies those alone to the host: 768 bytes a row."""

MAX_TOTAL_LEN = TensorSpec("max_total_len", "max_total_len", "int32", (1,))
BEST = (BATCH, NUM_LOGITS, CANDIDATES)
TOP = (
    TensorSpec("top_logits", "top_logits", "float32", BEST),
    TensorSpec("top_ids", "top_ids", "int64", BEST),
)


def phase_passes(spec: GraphSpec) -> Passes:
    """Both graphs get the same, and the same name: they are one file twice."""
    return (
        ("take_longest", take_longest),
        ("count_on_device", count_on_device),
        ("give_largest", partial(give_largest, count=CANDIDATES)),
        ("name_graph", _name_graph),
    )


def _name_graph(model: ir.Model) -> int:
    model.graph.name = "step"
    return 1


def _refuse(model: Any) -> None:
    check_cuda_model(model)


def _check(graph: Path) -> str:
    found = check_cuda_graph(graph)
    told = f"every node is on CUDA by the {found.proof} of ONNX Runtime {found.version}"
    return f"{told}; its partitioner was not asked: {found.why}" if found.why else told


TARGET = Target(
    name="cuda",
    opset=CPU.opset,
    emit=attention,
    passes=passes,
    required=CPU.required,
    phase_passes=phase_passes,
    computes_in_dtype=True,
    more_inputs=(MAX_TOTAL_LEN,),
    more_outputs=TOP,
    refuse=_refuse,
    check=_check,
)
