"""What the TensorRT provider of ONNX Runtime is told, against the real one over stub libraries: it
takes our options as they are, and goes on to TensorRT. Skips without onnxruntime-gpu."""

import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser
import pytest

from trtllm_lite.exporter.cuda_placement import stubs

GRAPH = """<ir_version: 10, opset_import: ["" : 21]>
g (float16[n, 4] x) => (float16[n, 4] y) { y = Add (x, x) }"""
OPEN = """
import os, sys
from pathlib import Path
import onnxruntime as ort
from trtllm_lite.runtime.backends import ort_providers
from trtllm_lite.runtime.backends.ort_providers import EngineSettings, ProfileShapes, find_provider
shapes = ProfileShapes("x:1x4", "x:2x4", "x:8x4")
settings = EngineSettings(16, shapes, Path(sys.argv[2]))
asked = ort_providers.tensorrt_options(settings)
if len(sys.argv) > 3:
    name, value = sys.argv[3].split("=")
    ort_providers.tensorrt_options = lambda settings: {**asked, name: value}
try:
    find_provider(ort, "tensorrt").session(sys.argv[1], ort.SessionOptions(), settings)
except Exception as error:
    print("refused:", error, flush=True)
os._exit(3)
"""
TENSORRT_LIBRARY = "libonnxruntime_providers_tensorrt.so"
REACHED = 42
# C++ calls methods of what this gives.
OBJECT = (
    "static long none(void) {{ return 0; }} void *{0}(void) {{ static void *methods[128];"
    " static struct {{ void *table; char rest[512]; }} made;"
    " for (int i = 0; i < 128; i++) methods[i] = (void *)none;"
    " made.table = methods; return &made; }}"
)


@pytest.fixture
def libraries(real_gpu_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of CUDA and TensorRT; whoever asks for TensorRT's builder or runtime ends the process."""
    monkeypatch.setitem(stubs.SPECIAL, "getPluginRegistry", OBJECT.format("getPluginRegistry"))
    for name in ("createInferBuilder_INTERNAL", "createInferRuntime_INTERNAL"):
        source = f"void _exit(int); void *{name}(void) {{ _exit({REACHED}); return 0; }}"
        monkeypatch.setitem(stubs.SPECIAL, name, source)
    folder = tmp_path / "stubs"
    folder.mkdir()
    providers = [real_gpu_package / name for name in (stubs.PROVIDER, TENSORRT_LIBRARY)]
    stubs.make_stubs(providers, folder)
    return folder


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (None, None),
        ("trt_unheard_of=1", "Invalid TensorRT EP option: trt_unheard_of"),
        ("trt_engine_cache_enable=1", "should be 'True' or 'False'"),
    ],
)
def test_the_provider_takes_our_options_and_asks_tensorrt(
    libraries: Path, tmp_path: Path, more: str | None, said: str | None
) -> None:
    graph = tmp_path / "graph.onnx"
    onnx.save(onnx.parser.parse_model(GRAPH), graph)
    arguments = [str(graph), str(tmp_path), *([more] if more else [])]
    ended = subprocess.run(
        [sys.executable, "-c", OPEN, *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        check=False,
    )
    if said is None:
        assert ended.returncode == REACHED, ended.stdout + ended.stderr
        assert "refused" not in ended.stdout
    else:
        assert ended.returncode == 3, ended.stderr
        assert said in ended.stdout
