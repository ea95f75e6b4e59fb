"""Grafted skeleton + graph table -> onnx_ir model whose inputs and outputs are the table.

Weights stay fake: they come out as initializers without data, named as the checkpoint's model
names them, each tied tensor once.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch

from trtllm_lite.exporter.graft import AttentionFacts
from trtllm_lite.exporter.lowering import Target
from trtllm_lite.exporter.skeleton import Skeleton
from trtllm_lite.exporter.wrapper import GraphModule
from trtllm_lite.runtime.manifest import GraphSpec, TensorSpec

CHATTY = ("torch.onnx", "torch._subclasses.fake_tensor", "transformers")
PREFIX = "model."
# Example sizes while tracing: distinct and above 1, so that no two dynamic sizes look equal.
EXAMPLE = {"batch": 2, "seq": 5, "num_logits": 3, "capacity": 11}
DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
ARGUMENTS = ("input_ids", "past_lens", "query_lens", "context_lens", "logits_indices")


def trace(
    skeleton: Skeleton, facts: list[AttentionFacts], graph: GraphSpec, target: Target
) -> ir.Model:
    """Trace one graph. The result's inputs, outputs and dimension names equal `graph`."""
    module = GraphModule(skeleton.model, facts, target.emit)
    with skeleton.fake_mode, quiet(), torch.no_grad():
        args, shapes = _arguments(graph)
        program = torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
    with quiet():
        onnx_program = torch.onnx.export(
            program, dynamo=True, opset_version=target.opset, optimize=False, verbose=False
        )
    assert onnx_program is not None
    model = onnx_program.model
    _apply_table(model, graph)
    _name_weights(model, skeleton.aliases)
    return model


def _arguments(graph: GraphSpec) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Example arguments of `GraphModule.forward` and their dynamic shapes."""
    dims = {name: torch.export.Dim(name) for name in EXAMPLE}
    by_role: dict[str, TensorSpec] = {t.role: t for t in graph.inputs}
    specs = [by_role.get(name) for name in ARGUMENTS]
    past = [t for t in graph.inputs if t.role in ("past_key", "past_value")]
    args = (*(_example(t) for t in specs), [_example(t) for t in past])
    shapes = (*(_dynamic(t, dims) for t in specs), [_dynamic(t, dims) for t in past])
    return args, shapes


def _example(spec: TensorSpec | None) -> torch.Tensor | None:
    if spec is None:
        return None
    shape = [EXAMPLE[d] if isinstance(d, str) else d for d in spec.shape]
    return torch.zeros(shape, dtype=DTYPES[spec.dtype])


def _dynamic(spec: TensorSpec | None, dims: dict[str, Any]) -> dict[int, Any] | None:
    if spec is None:
        return None
    return {axis: dims[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)}


def _apply_table(model: ir.Model, graph: GraphSpec) -> None:
    """Give inputs and outputs the names of the table, and dimensions its names throughout."""
    named: dict[str, str] = {}
    for values, specs in ((model.graph.inputs, graph.inputs), (model.graph.outputs, graph.outputs)):
        if len(values) != len(specs):
            raise AssertionError(f"{graph.phase}: traced {len(values)}, table {len(specs)}")
        for value, spec in zip(values, specs, strict=True):
            value.name = spec.name
            named.update(_symbols(value, spec))
            value.shape = ir.Shape(spec.shape)
    for node in model.graph:
        for value in node.outputs:
            _rename_dims(value, named)
    model.graph.name = graph.phase


def _symbols(value: ir.Value, spec: TensorSpec) -> Iterator[tuple[str, str]]:
    """The tracer's symbol of each named dimension."""
    traced = value.shape.dims if value.shape is not None else ()
    for symbol, name in zip(traced, spec.shape, strict=False):
        if isinstance(symbol, ir.SymbolicDim) and isinstance(name, str):
            yield str(symbol.value), name


def _rename_dims(value: ir.Value, named: dict[str, str]) -> None:
    if value.shape is not None and not value.is_graph_output():
        dims = (d if isinstance(d, int) else d.value for d in value.shape.dims)
        value.shape = ir.Shape([named.get(d, d) if isinstance(d, str) else d for d in dims])


def _name_weights(model: ir.Model, aliases: dict[str, str]) -> None:
    """Initializers without data get the model's own parameter names; tied ones become one."""
    initializers = model.graph.initializers
    for name in list(initializers):
        value = initializers.pop(name)
        canonical = _parameter_name(name, aliases)
        if canonical in initializers:
            ir.convenience.replace_all_uses_with(value, initializers[canonical])
            continue
        value.name = canonical
        if canonical in aliases:
            value.const_value = None
        initializers[canonical] = value


def _parameter_name(name: str, aliases: dict[str, str]) -> str:
    plain = name.removeprefix(PREFIX).replace(".head.", ".", 1)
    for candidate in (name.removeprefix(PREFIX), plain):
        if candidate in aliases:
            return aliases[candidate]
    return name


@contextmanager
def quiet() -> Iterator[None]:
    """Third-party chatter about optional packages, and failures that we report ourselves."""
    loggers = [logging.getLogger(name) for name in CHATTY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
