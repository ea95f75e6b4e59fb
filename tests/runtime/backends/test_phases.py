"""Which graph runs a batch."""

from dataclasses import replace

import numpy as np
import pytest

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.backends.phases import graph_for, graphs_to_open, takes_several_tokens
from trtllm_lite.runtime.manifest import GraphSpec, Manifest, Phase

DECODE: tuple[Phase, ...] = ("decode",)
TWO: tuple[Phase, ...] = ("prefill", "decode")
THREE: tuple[Phase, ...] = ("prefill", "decode", "extend")


def batch(phase: Phase, past: tuple[int, ...], seq: int, wanted: int = 1) -> Batch:
    rows = len(past)
    lens = np.array(past, np.int32)
    count = np.full(rows, seq, np.int32)
    ids = np.zeros((rows, seq), np.int64)
    return Batch(phase, 0, ids, lens, count, lens + count, np.zeros((rows, wanted), np.int64))


@pytest.mark.parametrize(
    ("given", "phase"),
    [
        (batch("prefill", (0, 0), 5), "prefill"),
        (batch("prefill", (0, 0), 1), "prefill"),
        (batch("prefill", (0, 3), 5), "extend"),
        (batch("prefill", (4,), 5), "extend"),
        (batch("prefill", (4, 0), 1), "decode"),
        (batch("decode", (4, 9), 1), "decode"),
        (batch("decode", (0, 0), 1), "prefill"),
        (batch("decode", (4, 9), 3, 3), "extend"),
        (batch("decode", (4, 9), 1, 2), "extend"),
    ],
)
def test_by_what_the_batch_needs(given: Batch, phase: Phase) -> None:
    assert graph_for(given, THREE) == phase


@pytest.mark.parametrize("phase", TWO)
def test_two_graphs_run_what_they_are_called(phase: Phase) -> None:
    assert graph_for(batch(phase, (0, 0), 1), TWO) == phase
    assert graph_for(batch(phase, (3, 0), 4, 4), TWO) == phase


def test_extend_runs_what_was_not_opened() -> None:
    assert graph_for(batch("decode", (0,), 1), ("decode", "extend")) == "decode"
    assert graph_for(batch("prefill", (0,), 5), ("decode", "extend")) == "extend"


def with_extend(manifest: Manifest) -> Manifest:
    prefill, decode = manifest.graphs
    extend = GraphSpec("extend", "extend.onnx", prefill.inputs, prefill.outputs)
    return replace(manifest, graphs=(prefill, decode, extend))


def test_graphs_to_open(plain_manifest: Manifest) -> None:
    three = with_extend(plain_manifest)
    assert graphs_to_open(plain_manifest, TWO) == TWO
    assert graphs_to_open(plain_manifest, DECODE) == DECODE
    assert graphs_to_open(three, TWO) == THREE
    assert graphs_to_open(three, DECODE) == ("decode", "extend")


def test_several_tokens(plain_manifest: Manifest) -> None:
    assert not takes_several_tokens(plain_manifest)
    assert takes_several_tokens(with_extend(plain_manifest))
