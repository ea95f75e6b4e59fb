"""Writes the kernel list that comes with the package, from the onnxruntime-gpu that is installed.

    LD_LIBRARY_PATH=STUBS python -m trtllm_lite.exporter.cuda_placement.record FILE

STUBS is a folder that `stubs.make_stubs` has filled; without a GPU's libraries or stubs, listing
the kernels ends the process.
"""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

CUDA = "CUDAExecutionProvider"


def record() -> dict[str, Any]:
    """The CUDA kernels and the schemas of their operators, as `kernel_list` reads them."""
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kernels = [
        [k.domain, k.op_name, *k.version_range, {n: list(t) for n, t in k.type_constraints.items()}]
        for k in state.get_all_opkernel_def()
        if k.provider == CUDA
    ]
    named = {(k[0], k[1]) for k in kernels}
    schemas = [
        [
            s.domain,
            s.name,
            s.since_version,
            s.max_input,
            _parameters(s.inputs),
            _parameters(s.outputs),
        ]
        for s in state.get_all_operator_schema()
        if (s.domain, s.name) in named
    ]
    return {"onnxruntime": ort.__version__, "kernels": kernels, "schemas": schemas}


def _parameters(formal: Any) -> list[list[Any]]:
    return [[p.typeStr, "Variadic" in str(p.option)] for p in formal]


if __name__ == "__main__":
    text = json.dumps(record(), separators=(",", ":"))
    Path(sys.argv[1]).write_bytes(gzip.compress(text.encode(), mtime=0))
    # What the libraries do at the end of a process is not written for stubs.
    os._exit(0)
