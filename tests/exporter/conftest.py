"""Fixtures of the exporter's tests: graphs are traced once and handed out as copies."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM

from trtllm_lite.exporter.checkpoint import open_checkpoint
from trtllm_lite.exporter.describe import file_entry
from trtllm_lite.exporter.graphs import Graphs, build_graphs
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.pipeline import ExportReport
from trtllm_lite.exporter.replay import greedy, prefill
from trtllm_lite.exporter.rounded.session import open_rounded
from trtllm_lite.runtime.backends.base import SessionOptions
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.manifest import GraphSpec
from trtllm_lite.runtime.progress import NoProgress

MAX_MODEL_LEN = 128


@pytest.fixture(scope="session")
def fresh_graphs(tiny_checkpoint: Path) -> Callable[[], Graphs]:
    """The lowered graphs of `tiny_checkpoint`; every call gives copies that may be changed."""
    checkpoint = open_checkpoint(str(tiny_checkpoint), None, NoProgress())
    made = build_graphs(checkpoint.config, find_target("cpu"), MAX_MODEL_LEN, NoProgress())

    def fresh() -> Graphs:
        return dataclasses.replace(made, models=tuple(m.clone() for m in made.models))

    return fresh


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, fresh_graphs: Callable[[], Graphs]) -> None:
    """`export` of a checkpoint shaped as `tiny_checkpoint` skips the trace."""
    monkeypatch.setattr("trtllm_lite.exporter.pipeline.build_graphs", lambda *_args: fresh_graphs())


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a folder that the test may change."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / f"copy-of-{folder.name}"))

    return copy


@pytest.fixture
def for_cuda() -> Callable[[ir.Model, GraphSpec], dict[str, int]]:
    """Rewrites the graph of the `cpu` target; how often each pass of the `cuda` target matched."""
    target = find_target("cuda")
    return lambda model, spec: {name: run(model) for name, run in target.phase_passes(spec)}


@pytest.fixture
def as_cuda(for_cuda: Callable[[ir.Model, GraphSpec], object]) -> Callable[[Bundle, Path], Bundle]:
    """A bundle of the `cpu` target with the graph of the `cuda` target, in float32, in a folder."""
    target = find_target("cuda")

    def table(spec: GraphSpec) -> GraphSpec:
        inputs, outputs = (*spec.inputs, *target.more_inputs), (*spec.outputs, *target.more_outputs)
        return dataclasses.replace(spec, inputs=inputs, outputs=outputs)

    def made(plain: Bundle, folder: Path) -> Bundle:
        manifest = plain.manifest
        model = ir.load(plain.graph_path("decode"))
        for_cuda(model, manifest.graph("decode"))
        shutil.copy(plain.folder / manifest.weights, folder)
        graphs = tuple(map(table, manifest.graphs))
        for graph in graphs:
            ir.save(model, folder / graph.file)
        files = tuple(file_entry(folder, graph.file) for graph in graphs)
        changed = dataclasses.replace(manifest, target="cuda", graphs=graphs, files=files)
        return Bundle(folder, changed)

    return made


@pytest.fixture
def half_errors() -> Callable[[Path, ExportReport], tuple[float, float]]:
    """How far logits are from those of transformers' eager model in float32 with the same rounded
    weights, at most: a bundle's in half precision, and the eager model's in that precision. Ragged
    prompts by prefill, in chunks, and decode."""

    def measure(checkpoint: Path, report: ExportReport) -> tuple[float, float]:
        bundle = open_bundle(report.output or Path(), check_hashes=False)
        session = open_rounded(bundle, SessionOptions(num_slots=3, capacity=64))
        rng, vocab = np.random.default_rng(2), bundle.manifest.model.vocab_size
        prompts = [rng.integers(0, vocab, n).tolist() for n in (9, 1, 40)]
        tokens, logits = greedy(session, prompts, 8)
        chunked = prefill(session, prompts, 5)
        session.close()
        exact, half = _eager(checkpoint, "float32"), _eager(checkpoint, bundle.manifest.dtype)
        for rounded, parameter in zip(half.parameters(), exact.parameters(), strict=True):
            parameter.data.copy_(rounded)
        ours, theirs = [], []
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([[*prompt, *tokens[row][:-1]]])
            wanted, found = (_logits(model, ids, len(logits)) for model in (exact, half))
            ours += [logits[:, row] - wanted, chunked[row] - wanted[0]]
            theirs.append(found - wanted)
        return _largest(ours), _largest(theirs)

    return measure


def _eager(checkpoint: Path, dtype: str) -> Any:
    kind = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=kind, attn_implementation="eager"
    ).eval()


def _logits(model: Any, ids: torch.Tensor, last: int) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0, -last:].float().numpy()


def _largest(distances: list[Any]) -> float:
    return max(float(np.abs(distance).max()) for distance in distances)
