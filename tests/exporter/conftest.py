"""Fixtures of the exporter's tests: graphs are traced once and handed out as copies."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from trtllm_lite.exporter.checkpoint import open_checkpoint
from trtllm_lite.exporter.describe import file_entry
from trtllm_lite.exporter.graphs import Graphs, build_graphs
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.runtime.bundle import Bundle
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
