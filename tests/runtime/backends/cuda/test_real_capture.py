"""The session on the CUDA provider itself, over stub libraries: in which calls it captures CUDA
graphs, that nothing happens meanwhile that a GPU would refuse, and how often it takes memory. What
is computed is nothing. Skips without onnxruntime-gpu."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtllm_lite.exporter.cuda_placement import stubs
from trtllm_lite.runtime.backends.graph_io import with_cache_dtype
from trtllm_lite.runtime.bundle import Bundle

# Each call that matters is told, and what a GPU refuses while a stream is captured is refused.
WATCH = """#include <stdio.h>
static int capturing;
int failing;
static int tell(const char *what) {
    fprintf(stderr, "CUDA %s%s\\n", capturing ? "while capturing: " : "", what);
    return capturing ? 900 : 0;
}
"""
WATCHED = {
    "cudaMalloc": 'int cudaMalloc(void **p, size_t n) { *p = malloc(n); return tell("malloc"); }',
    "cudaFree": 'int cudaFree(void *p) { free(p); return tell("free"); }',
    "cudaStreamSynchronize": "int cudaStreamSynchronize(void *s) "
    '{ return capturing ? tell("synchronize") : 0; }',
    "cudaDeviceSynchronize": "int cudaDeviceSynchronize(void) "
    '{ return capturing ? tell("synchronize") : 0; }',
    "cudaMemcpy": "int cudaMemcpy(void *d, void *s, size_t n, int k) "
    '{ memcpy(d, s, n); return tell("memcpy"); }',
    "cudaStreamBeginCapture": "int cudaStreamBeginCapture(void *s, int m) "
    '{ tell("begin"); capturing = 1; return 0; }',
    "cudaStreamEndCapture": "int cudaStreamEndCapture(void *s, void **g) "
    '{ capturing = 0; tell("end"); *g = (void *)64; return 0; }',
    "cudaGraphInstantiate": "int cudaGraphInstantiate(void **g, void *a, size_t f) "
    "{ *g = (void *)128; return 0; }",
    "cudaGraphLaunch": 'int cudaGraphLaunch(void *g, void *s) { return tell("launch"); }',
    "cudaGetLastError": "int cudaGetLastError(void) { return capturing && failing ? 2 : 0; }",
    "cudaLaunchKernel": "int cudaLaunchKernel(void *f, int gx, int gy, int gz, int bx, int by, "
    "int bz, void **a, size_t n, void *s) "
    '{ return s == (void *)16 ? 0 : tell("a kernel on another stream"); }',
    # As the provided one, with what kernels are launched by: threads of a warp, and of a block.
    "cudaGetDeviceProperties": "int cudaGetDeviceProperties(char *p, int d) { memset(p, 0, 1008);"
    " *(size_t *)(p + 296) = 49152; *(int *)(p + 308) = 32; *(int *)(p + 320) = 1024;"
    " for (int i = 0; i < 3; i++) { ((int *)(p + 324))[i] = 1024; ((int *)(p + 336))[i] = 65535; }"
    " ((int *)(p + 360))[0] = 9; *(int *)(p + 384) = 132; return 0; }",
}
RUN = """
import ctypes, os, pickle, sys
from pathlib import Path
import numpy as np
import onnxruntime as ort
from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.host_device import HostDevice
from trtllm_lite.runtime.backends.ort_cuda import open_on

class Stubbed(HostDevice):
    stream = 16

bundle = pickle.loads(Path(sys.argv[1]).read_bytes())
session = open_on(ort, Stubbed(), bundle, SessionOptions(12, 64))

def tell(what):
    print("TEST", what, file=sys.stderr, flush=True)

def run(what, phase, rows, past):
    tell(what)
    counts = np.array([len(row) for row in rows], np.int32)
    past = np.array(past, np.int32)
    last = counts.astype(np.int64)[:, None] - 1
    session.run(Batch(phase, 0, np.array(rows), past, counts, past + counts, last))

run("prefill", "prefill", [[1, 2, 3], [4, 5, 6]], [0, 0])
run("two rows", "decode", [[1], [2]], [3, 3])
run("two rows again", "decode", [[1], [2]], [4, 4])
run("one row", "decode", [[1]], [5])
run("more of a prompt", "prefill", [[1, 2]], [6])
run("two rows once more", "decode", [[1], [2]], [5, 5])
failing = ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[2]), "failing")
failing.value = 1
run("three rows", "decode", [[1], [2], [3]], [6, 6, 1])
run("three rows again", "decode", [[1], [2], [3]], [7, 7, 2])
run("two rows at last", "decode", [[1], [2]], [8, 8])
for length in range(4, 64):
    run("longer prompts", "prefill", [[1] * length], [0])
tell("end")
sys.stderr.flush()
os._exit(0)
"""


def half(path: Path) -> None:
    """The graph at `path` in float16: what the attention has on CUDA. Logits stay float32."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past_key", "past_value", "present")):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    (head,) = (node for node in model.graph.node if node.output[0] == "logits")
    head.output[0] = "logits_16"
    cast = helper.make_node("Cast", ["logits_16"], ["logits"], to=TensorProto.FLOAT)
    model.graph.node.insert(list(model.graph.node).index(head) + 1, cast)
    onnx.save(model, path)


def told(text: str) -> dict[str, list[str]]:
    """What the stubs told of in each part of the run."""
    parts: dict[str, list[str]] = {}
    for line in text.splitlines():
        kind, _, what = line.partition(" ")
        if kind == "TEST":
            parts.setdefault(what, [])
        elif kind == "CUDA" and parts:
            parts[list(parts)[-1]].append(what)
    return parts


def test_graphs_are_captured_once_and_whole_or_not_at_all_and_memory_is_bounded(
    real_gpu_package: Path, toy_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stubs, "HEADER", stubs.HEADER + WATCH)
    monkeypatch.setattr(stubs, "SPECIAL", stubs.SPECIAL | WATCHED)
    folder = tmp_path / "stubs"
    folder.mkdir()
    stubs.make_stubs([real_gpu_package / stubs.PROVIDER], folder)
    for phase in ("prefill", "decode"):
        half(tmp_path / f"{phase}.onnx")
    manifest = replace(with_cache_dtype(toy_bundle.manifest, "float16"), dtype="float16")
    kept = tmp_path / "bundle"
    kept.write_bytes(pickle.dumps(replace(toy_bundle, manifest=manifest)))
    (runtime,) = folder.glob("libcudart.so.*[0-9]")
    ended = subprocess.run(
        [sys.executable, "-c", RUN, str(kept), str(runtime)],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    parts = told(ended.stderr)
    assert list(parts)[-1] == "end", ended.stderr
    assert [x for part in parts.values() for x in part if x not in ("malloc", "free")] == [
        *("begin", "end", "launch"),  # two rows: two runs before, in the same call
        "launch",
        *("begin", "end", "launch"),  # one row
        "launch",  # two rows once more
        *("begin", "end", "launch"),  # three rows: what was captured till the failure
        "launch",  # two rows at last
    ]
    captured = {name for name, part in parts.items() if "begin" in part}
    assert captured == {"two rows", "one row", "three rows"}
    assert parts["three rows again"] == []
    assert "decode runs without CUDA graphs" in ended.stderr
    # Not a piece of memory for each prompt that is longer than all before.
    assert parts["longer prompts"].count("malloc") < 5
