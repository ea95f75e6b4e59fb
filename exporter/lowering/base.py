"""What a target has to offer to the exporter."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lite.exporter.graft import Emit
from trtllm_lite.runtime.manifest import GraphSpec, Phase, TensorSpec

Pass = Callable[[Any], int]
"""Rewrites an onnx_ir.Model in place and returns in how many places."""
Passes = tuple[tuple[str, Pass], ...]
Refuse = Callable[[Any], None]
"""Raises UnsupportedError for an onnx_ir.Model, before its weights are written, that would not be
run as meant."""
Check = Callable[[Path], str | None]
"""The same of a graph that was written beside its weights. What it returns is told to the user."""


def no_passes(spec: GraphSpec) -> Passes:
    """Of a target whose graphs differ in nothing but their weights."""
    return ()


def no_refusal(model: Any) -> None:
    """Of a target whose engine takes what was made."""


def no_check(graph: Path) -> None:
    """Of a target whose engine takes what was made."""


@dataclass(frozen=True)
class Target:
    """One target: its name, the opset it is traced with, its attention operator, and its passes,
    in order, for sequences of at most so many tokens.

    A pass in `required` that finds nothing to change is an error: it has stopped matching.

    phases: the graphs of a bundle; each is a copy of the one that was traced, and `phase_passes`
    are those of its table. one_token_decode: decode takes one token a row. computes_in_dtype: the
    type that weights are stored in is that of the arithmetic and of the KV cache as well; else both
    are float32. dequantizes: quantized weights become floats in the graph, by DequantizeLinear, and
    have one format in all graphs. finish: the last passes, once the formats of the weights are
    chosen. more_inputs: what the graphs of this target take beside the inputs of all;
    `phase_passes` put it in, as they do with more_outputs. refuse: of each finished graph, before
    the work on its weights; check: of each written one, before the bundle is finished.
    """

    name: str
    opset: int
    emit: Emit
    passes: Callable[[int], Passes]
    required: frozenset[str] = frozenset()
    phases: tuple[Phase, ...] = ("prefill", "decode")
    phase_passes: Callable[[GraphSpec], Passes] = no_passes
    one_token_decode: bool = False
    computes_in_dtype: bool = False
    dequantizes: bool = False
    finish: Passes = ()
    more_inputs: tuple[TensorSpec, ...] = ()
    more_outputs: tuple[TensorSpec, ...] = ()
    refuse: Refuse = no_refusal
    check: Check = no_check
