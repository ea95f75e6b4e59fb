"""Which caches a bundle can be made for: what is taken by itself, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from trtllm_lite.exporter.native.cache import cache_dtypes
from trtllm_lite.exporter.native.lower import NativeGraph
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import ExportReport
from trtllm_lite.runtime.errors import UsageError


def native_graph(*operators: str) -> NativeGraph:
    nodes = [ir.node(name, []) for name in operators]
    return NativeGraph(ir.Model(ir.Graph([], [], nodes=nodes), ir_version=10), {}, {})


def test_which_caches_can_be_had() -> None:
    ours = native_graph("Attention", "BlockLinear", "Attention")
    mixed = native_graph("Attention", "GroupQueryAttention")
    assert cache_dtypes("auto", ours) == ("float16", "float32")
    assert cache_dtypes("int8", ours) == ("int8", "float32")
    assert cache_dtypes("float32", ours) == ("float32",)
    for graph in (mixed, native_graph("BlockLinear"), None):
        assert cache_dtypes("auto", graph) == cache_dtypes("float32", graph) == ("float32",)
    with pytest.raises(UsageError, match="got 'float16'; 1 of 2 layers have attention that the na"):
        cache_dtypes("float16", mixed)
    with pytest.raises(UsageError, match="got 'int8'; it needs the native kernels, which run"):
        cache_dtypes("int8", None)


@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_a_cache_that_cannot_be_had_is_refused_before_any_work(
    export_again: Callable[..., ExportReport], tmp_path: Path
) -> None:
    """Its heads are of a size that the kernel has not."""
    for dry_run in (False, True):
        options = {"quantize": "int8", "kv_dtype": "float16", "dry_run": dry_run}
        with pytest.raises(UsageError, match="got 'float16'; 1 of 1 layers have attention that"):
            export_again(tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
    report = export_again(tmp_path / "out", quantize="int8", kv_dtype="auto")
    assert report.kv_dtypes == ("float32",)


@pytest.mark.parametrize("quantize", ["none", "auto"])
def test_plain_weights_have_a_plain_cache(quantize: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--kv-dtype float16: only the native kernels .* add --q"):
        ExportOptions(model="m", output=tmp_path, quantize=quantize, kv_dtype="float16")
    with pytest.raises(UsageError, match="--kv-dtype: got 'fp8'; allowed: auto, float32, float16"):
        ExportOptions(model="m", output=tmp_path, kv_dtype="fp8")
