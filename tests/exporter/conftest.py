"""Fixtures of the exporter's tests: graphs are traced once and handed out as copies."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_lite.exporter.checkpoint import open_checkpoint
from trtllm_lite.exporter.graphs import Graphs, build_graphs
from trtllm_lite.exporter.lowering import find_target
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
