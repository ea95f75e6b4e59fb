"""What a target has to offer to the exporter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_lite.exporter.graft import Emit

Pass = Callable[[Any], int]
"""Rewrites an onnx_ir.Model in place and returns in how many places."""


@dataclass(frozen=True)
class Target:
    """One target: its name, the opset it is traced with, its attention operator, and its passes,
    in order, for sequences of at most so many tokens.

    A pass in `required` that finds nothing to change is an error: it has stopped matching.
    """

    name: str
    opset: int
    emit: Emit
    passes: Callable[[int], tuple[tuple[str, Pass], ...]]
    required: frozenset[str] = frozenset()
