"""Tiny quantized bundles of three families, each traced once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trtllm_lite.exporter.calibration.cache_scales import cache_scales
from trtllm_lite.exporter.families import BASE, PROVED, tiny_config
from trtllm_lite.exporter.graphs import Graphs, build_graphs
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.native.cache import CacheScales
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import ExportReport, export
from trtllm_lite.exporter.quantize.calibrate import NOT_CALIBRATED
from trtllm_lite.exporter.quantize.formats import FORMATS, Format
from trtllm_lite.exporter.quantize.plan import plan_formats
from trtllm_lite.exporter.quantize.quantizer import RoundToNearest, dequantized
from trtllm_lite.exporter.quantize.rewrite import find_linears
from trtllm_lite.runtime.backends.base import KernelChoice, SessionOptions
from trtllm_lite.runtime.backends.onnxruntime import open_session
from trtllm_lite.runtime.backends.ort_session import OrtSession
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.host_cache import host_cache
from trtllm_lite.runtime.kernels import find_kernels
from trtllm_lite.runtime.progress import NoProgress

NAMES = ("llama", "gemma2", "qwen2")
SLOTS, CAPACITY = 4, 96


def config_of(name: str) -> Any:
    """gemma2: tanh-GELU, a window, softcaps, norms around each part. qwen2: biases, and heads of
    24, for which there is no kernel."""
    if name == "gemma2":
        return tiny_config(next(f for f in PROVED if f.model_type == "gemma2"))
    values = {**BASE, "hidden_size": 96, "intermediate_size": 70, "num_hidden_layers": 1}
    return AutoConfig.for_model("qwen2", **values, tie_word_embeddings=False)


@dataclass(frozen=True)
class Family:
    """A checkpoint, the float graphs of it, and its int8 bundle, which is read-only."""

    name: str
    checkpoint: Path
    graphs: Graphs
    report: ExportReport

    @property
    def bundle(self) -> Path:
        assert self.report.output is not None
        return self.report.output

    @property
    def layers(self) -> int:
        return len(self.graphs.facts)

    @property
    def formats(self) -> dict[str, Format]:
        """Of every weight of the decode graph, by the weight's name."""
        weights = find_linears(self.graphs.models)
        plan = plan_formats("int8", weights)
        return {w.name: FORMATS[plan.of("decode", w)] for w in weights}

    def rounded_model(self) -> Any:
        """The eager float32 model of the checkpoint with its weights rounded as the bundle's."""
        model = AutoModelForCausalLM.from_pretrained(
            self.checkpoint, attn_implementation="eager", dtype=torch.float32
        ).eval()
        parameters = dict(model.named_parameters())
        for weight in find_linears(self.graphs.models):
            kind = self.formats[weight.name]
            for part in weight.parts:
                rows = parameters[part].detach().numpy()
                made = RoundToNearest().quantize(part, rows, kind.bits, kind.block)
                parameters[part].data.copy_(torch.from_numpy(dequantized(made, kind.block)))
        return model


def exported(
    checkpoint: Path,
    graphs: Graphs,
    output: Path,
    quantize: str,
    kv_dtype: str = "float32",
    cache: CacheScales | None = None,
    *,
    dry_run: bool = False,
) -> ExportReport:
    """Without a trace, a calibration text and a certificate."""
    options = ExportOptions(
        model=str(checkpoint),
        output=output,
        max_num_seqs=SLOTS,
        verify=False,
        quantize=quantize,
        kv_dtype=kv_dtype,
        dry_run=dry_run,
    )
    calibrated = replace(NOT_CALIBRATED, cache=cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtllm_lite.exporter.pipeline.build_graphs", lambda *_args: graphs)
        patch.setattr("trtllm_lite.exporter.pipeline.calibrate", lambda *_args: calibrated)
        return export(options, NoProgress())


@pytest.fixture
def export_again(family: Family) -> Callable[..., ExportReport]:
    """The export of a family with other options, of graphs that are traced already."""

    def export_again(output: Path, **options: Any) -> ExportReport:
        return exported(family.checkpoint, family.graphs, output, **options)

    return export_again


LlamaReport = Callable[[str], ExportReport]


@pytest.fixture(scope="session")
def llama_report(
    tiny_checkpoint: Path,
    fresh_graphs: Callable[[], Graphs],
    tmp_path_factory: pytest.TempPathFactory,
) -> LlamaReport:
    """The export of `tiny_checkpoint` in the asked format, made once; read-only."""

    @cache
    def report(quantize: str) -> ExportReport:
        output = tmp_path_factory.mktemp(quantize) / "bundle"
        return exported(tiny_checkpoint, fresh_graphs(), output, quantize)

    return report


@pytest.fixture(scope="session")
def llama_bundle(llama_report: LlamaReport) -> Callable[[str], Path]:
    def bundle(quantize: str) -> Path:
        output = llama_report(quantize).output
        assert output is not None
        return output

    return bundle


@pytest.fixture(scope="session", params=NAMES)
def family(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Path,
    fresh_graphs: Callable[[], Graphs],
    llama_report: LlamaReport,
    random_checkpoint: Callable[..., Path],
) -> Family:
    name: str = request.param
    if name == "llama":
        return Family(name, tiny_checkpoint, fresh_graphs(), llama_report("int8"))
    folder = tmp_path_factory.mktemp(name)
    config = config_of(name)
    checkpoint = random_checkpoint(config, folder / "checkpoint")
    graphs = build_graphs(config, find_target("cpu"), 128, NoProgress())
    return Family(name, checkpoint, graphs, exported(checkpoint, graphs, folder / "out", "int8"))


@dataclass(frozen=True)
class Cached:
    """A family's bundle that is made for a cache of another type. `scales`: of an int8 one."""

    family: Family
    kind: str
    bundle: Path
    scales: CacheScales | None


@pytest.fixture(scope="session", params=["float16", "int8"])
def cached(
    request: pytest.FixtureRequest, family: Family, tmp_path_factory: pytest.TempPathFactory
) -> Cached:
    kind: str = request.param
    scales = None
    if kind == "int8":
        windows = np.random.default_rng(0).integers(3, 100, (4, 48))
        layers = family.graphs.kv.layers
        scales = cache_scales(family.rounded_model(), layers, windows, 96, NoProgress())
    output = tmp_path_factory.mktemp(f"{family.name}-{kind}") / "bundle"
    graphs = replace(family.graphs, models=tuple(m.clone() for m in family.graphs.models))
    exported(family.checkpoint, graphs, output, "int8", kind, scales)
    return Cached(family, kind, output, scales)


Open = Callable[..., OrtSession]


@pytest.fixture
def open_kernels(tmp_path: Path) -> Open:
    """A session of a bundle with the asked kernels. Skips where our own cannot run."""

    def open_kernels(bundle: Path, kernels: KernelChoice, **more: Any) -> OrtSession:
        if kernels == "native" and find_kernels().library is None:
            pytest.skip(f"no native kernels: {find_kernels().reason}")
        options: dict[str, Any] = {
            "intra_op_num_threads": 1,
            "host_cache": host_cache(bundle, user_folder=tmp_path / "cache"),
        }
        asked = SessionOptions(SLOTS, CAPACITY, kernels=kernels, **options | more)
        return open_session(open_bundle(bundle), asked)

    return open_kernels
