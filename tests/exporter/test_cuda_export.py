"""A bundle of target "cuda", certified on the CPU through the session of that target."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from trtllm_lite.exporter import prompts, verify
from trtllm_lite.exporter.cuda_placement import check_cuda_model
from trtllm_lite.exporter.families import PROVED, tiny_config
from trtllm_lite.exporter.graphs import Graphs, build_graphs
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import ExportReport, export
from trtllm_lite.exporter.quantize.apply import prepare
from trtllm_lite.exporter.quantize.calibrate import NOT_CALIBRATED
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.progress import NoProgress


@dataclass
class Exports:
    """Exports by weight format, all of one trace."""

    checkpoint: Path
    graphs: Graphs
    reports: dict[str, ExportReport] = field(default_factory=dict)

    def __call__(self, quantize: str) -> ExportReport:
        if quantize not in self.reports:
            output = self.checkpoint.parent / quantize
            self.reports[quantize] = self.export(output, self.graphs, quantize=quantize)
        return self.reports[quantize]

    def export(self, output: Path, graphs: Graphs, **options: Any) -> ExportReport:
        asked = ExportOptions(str(self.checkpoint), output, target="cuda", **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trtllm_lite.exporter.pipeline.build_graphs", lambda *args: graphs)
            # What a calibration text does to weights is the same for every target.
            patch.setattr("trtllm_lite.exporter.pipeline.calibrate", lambda *args: NOT_CALIBRATED)
            patch.setattr(verify, "TEXT_TOKENS", 1024)
            patch.setattr(verify, "NEW_TOKENS", 4)
            patch.setattr(prompts, "TEXTS", prompts.TEXTS[:3])
            return export(asked, NoProgress())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Any) -> Exports:
    folder = tmp_path_factory.mktemp("cuda")
    config = tiny_config(next(f for f in PROVED if f.key == "qwen2"))
    checkpoint = random_checkpoint(config, folder / "checkpoint")
    length = config.max_position_embeddings
    return Exports(
        checkpoint, build_graphs(config, find_target("cuda"), length, NoProgress(), "float16")
    )


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_bundle_is_certified(exported: Exports, quantize: str) -> None:
    report = exported(quantize)
    assert report.parity is not None
    assert report.parity["passed"]
    assert report.output is not None
    manifest = open_bundle(report.output).manifest
    assert (manifest.target, manifest.dtype, manifest.kv.dtype) == ("cuda", "float16", "float16")
    assert manifest.quantization.prefill == manifest.quantization.decode
    model = ir.load(report.output / "decode.onnx")
    assert check_cuda_model(model).proof == "kernel list"
    kinds = {v.dtype for v in model.graph.initializers.values() if v.name and "scale" in v.name}
    assert kinds == (set() if quantize == "none" else {ir.DataType.FLOAT16})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_weights_are_on_cuda(exported: Exports, quantize: str, dtype: str) -> None:
    """Scales have the type that the graph computes in."""
    graphs = exported.graphs
    if dtype == "bfloat16":
        models = tuple(model.clone() for model in graphs.models)
        for model in models:
            for value in all_values(model.graph):
                if value.dtype == ir.DataType.FLOAT16:
                    value.type = ir.TensorType(ir.DataType.BFLOAT16)
        graphs = replace(graphs, models=models)
    prepared = prepare(graphs, quantize, dtype, "same")
    assert {s.dtype for s in prepared.stored} == {dtype, "uint8"}
    for model in prepared.graphs.models:
        assert check_cuda_model(model).proof == "kernel list"
        assert "FusedMatMul" not in {node.op_type for node in model.graph}


def all_values(graph: ir.Graph) -> list[ir.Value]:
    made = [value for node in graph for value in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *made]


def test_both_phases_are_one_file_twice(exported: Exports) -> None:
    """So that one session, with one copy of the weights, serves both."""
    report = exported("none")
    assert report.output is not None
    texts = [(report.output / f"{phase}.onnx").read_bytes() for phase in ("prefill", "decode")]
    assert texts[0] == texts[1]
    tables = [(g.inputs, g.outputs) for g in report.manifest.graphs]
    assert tables[0] == tables[1]


def test_weights_take_half_of_float32(exported: Exports) -> None:
    report = exported("none")
    parameters = report.manifest.model.num_parameters
    tables = 2 * 2 * report.manifest.limits.max_model_len * report.manifest.kv.layers[0].head_dim
    assert 2 * parameters <= report.weight_bytes < 2 * parameters + tables + 4096 * 40


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_node_that_is_not_on_cuda_fails_the_export(
    exported: Exports, tmp_path: Path, dry_run: bool
) -> None:
    """Before any weight is written, and no bundle is left."""
    models = tuple(model.clone() for model in exported.graphs.models)
    for model in models:
        (ids,) = (v for v in model.graph.inputs if v.name == "input_ids")
        model.graph.append(ir.node("Shape", [ids]))
    graphs = replace(exported.graphs, models=models)
    with pytest.raises(UnsupportedError, match=r"Shape.*host memory"):
        exported.export(tmp_path / "out", graphs, verify=False, dry_run=dry_run)
    assert not (tmp_path / "out").exists()
