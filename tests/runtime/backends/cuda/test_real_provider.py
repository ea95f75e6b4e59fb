"""What is asked of the CUDA provider, against the real one over stub libraries: it takes the
options and the addresses. Skips without onnxruntime-gpu."""

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser

from trtllm_lite.exporter.cuda_placement.stubs import PROVIDER, make_stubs

GRAPH = """<ir_version: 10, opset_import: ["" : 23]>
g (float16[n] x, int64[1] shape) => (bfloat16[m] y) {
    z = Cast <to = 16> (x)
    y = Reshape (z, shape)
}"""
OPEN = """
import json, os, sys
import numpy as np
import onnxruntime as ort
from trtllm_lite.runtime.backends.ort_cuda import provider_options
from trtllm_lite.runtime.backends.ort_providers import CPU, CUDA
from trtllm_lite.runtime.backends.ort_bound import element_type
asked = provider_options(0x10)
session = ort.InferenceSession(sys.argv[1], providers=[(CUDA, asked), CPU])
binding = session.io_binding()
binding.bind_input("x", "cuda", 0, np.float16, (4,), 256)
binding.bind_input("shape", "cpu", 0, np.int64, (1,), np.ones(1, np.int64).ctypes.data)
binding.bind_output("y", "cuda", 0, element_type("bfloat16"), (4,), 512)
options = ort.RunOptions()
options.add_run_config_entry("gpu_graph_id", "3")
got = session.get_provider_options()[CUDA]
known = {name: [asked[name], got[name]] for name in asked if name in got}
try:
    other = ort.InferenceSession(sys.argv[1], providers=[(CUDA, {**asked, "unheard_of": "1"}), CPU])
    refused = CUDA not in other.get_providers()
except Exception:
    refused = True
print(json.dumps([known, refused]), flush=True)
os._exit(0)
"""


def test_the_provider_takes_our_options(real_gpu_package: Path, tmp_path: Path) -> None:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    make_stubs([real_gpu_package / PROVIDER], stubs)
    graph = tmp_path / "graph.onnx"
    onnx.save(onnx.parser.parse_model(GRAPH), graph)
    ended = subprocess.run(
        [sys.executable, "-c", OPEN, str(graph)],
        env={**os.environ, "LD_LIBRARY_PATH": str(stubs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # ONNX Runtime prints about what it refuses before that.
    known, refused = json.loads(ended.stdout.splitlines()[-1])
    assert {"user_compute_stream", "enable_cuda_graph"} <= known.keys()
    for name, (asked, got) in known.items():
        assert got == asked, name
    # So the options that it does not tell of again were taken as well.
    assert refused
