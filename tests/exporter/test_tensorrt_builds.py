"""What `export --target tensorrt` writes, built by TensorRT-RTX, which needs no GPU for it.

What the plans compute is not seen here: the graphs' arithmetic is proved with ONNX Runtime.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.exporter.families import PROVED, tiny_config
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import export
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.engines.engine_builder import build_engines
from trtllm_lite.runtime.engines.engine_key import BuildOptions
from trtllm_lite.runtime.engines.profiles import engine_limits
from trtllm_lite.runtime.engines.trt_module import installed_tensorrt
from trtllm_lite.runtime.progress import NoProgress


@pytest.mark.parametrize(
    ("attention", "expected"),
    [("lengths", [(2, 0, 0), (2, 1, 0), (2, 1, 1)]), ("mask", [(2, 0, 0)] * 3)],
)
def test_windows_and_lengths_are_read_as_they_are_meant(
    attention: str,
    expected: list[tuple[int, int, int]],
    tmp_path: Path,
    random_checkpoint: Callable[[Any, Path], Path],
) -> None:
    """Gemma 3: a layer that slides, which is a mask, and one that sees all, which has lengths, or a
    mask as well: then nothing has to be put back, so any parser of TensorRT reads it rightly. In
    bfloat16, which ONNX Runtime cannot run on a CPU."""
    found = [trt for trt in installed_tensorrt() if trt.flavour == "tensorrt_rtx"]
    if not found:
        pytest.skip("TensorRT-RTX is not installed: pip install 'trtllm-lite[rtx]'")
    config = tiny_config(next(f for f in PROVED if f.name == "Gemma 3"))
    config.layer_types = ["sliding_attention", "full_attention"]
    config.num_hidden_layers = 2
    options = ExportOptions(
        model=str(random_checkpoint(config, tmp_path / "checkpoint")),
        output=tmp_path / "bundle",
        target="tensorrt",
        dtype="bfloat16",
        verify=False,
        attention=attention,
    )
    export(options, NoProgress())
    bundle = open_bundle(options.output)
    limits = engine_limits(bundle.manifest.limits, 4, None, None)
    report = build_engines(bundle, BuildOptions(("sm86",), limits), found[0], NoProgress())
    plans = report.engine.record.plans
    counts = [(p.attention_layers, p.lengths_set, p.lower_right) for p in plans]
    assert counts == expected
    for phase in report.ledger.phases:
        assert phase.weights is not None
        assert phase.weights < 1.1 * phase.file_weights
