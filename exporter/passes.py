"""Rewrites of a traced graph. Each takes an onnx_ir model, changes it in place, and returns in how
many places it did."""

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import optimizer
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules.common import (
    cast_cast_rule,
    collapse_slice2_rule,
    collapse_slice_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    reshape_reshape_rule,
    transpose_transpose_rule,
    unsqueeze_unsqueeze_rule,
)
from onnxscript.rewriter.rules.fusion import _rms_normalization

MICROSOFT = "com.microsoft"
NAME_SCOPES = "pkg.torch.onnx.name_scopes"
# `namespace` is what graph viewers group nodes by.
KEPT_NOTES = {NAME_SCOPES, "namespace"}
# onnxscript's default set also holds rules that scan the whole graph at every node.
SIMPLIFY = RewriteRuleSet(
    [
        cast_cast_rule,
        collapse_slice_rule,
        collapse_slice2_rule,
        no_op_cast_rule,
        no_op_expand_rule,
        no_op_transpose_rule,
        reshape_reshape_rule,
        transpose_transpose_rule,
        unsqueeze_unsqueeze_rule,
    ]
)
RMS_NORM = RewriteRuleSet(_rms_normalization.rms_normalization_rules)


def fold_constants(model: ir.Model) -> int:
    """Fold what does not depend on inputs or weights. Returns the number of nodes removed.

    Weights have no data here; as graph inputs the folder leaves them alone.
    """
    graph = model.graph
    before = len(graph)
    weights = [v for v in graph.initializers.values() if v.const_value is None]
    for value in weights:
        del graph.initializers[str(value.name)]
        graph.inputs.append(value)
    try:
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        common.DeduplicateInitializersPass()(model)
        SIMPLIFY.apply_to_model(model)
        common.CommonSubexpressionEliminationPass()(model)
        common.IdentityEliminationPass()(model)
        common.RemoveUnusedNodesPass()(model)
    finally:
        for value in weights:
            graph.inputs.remove(value)
            graph.initializers[str(value.name)] = value
    return before - len(graph)


def drop_unused_weights(model: ir.Model) -> int:
    """Remove initializers that no node reads (the other phase may read them)."""
    unused = [n for n, v in model.graph.initializers.items() if not v.uses()]
    for name in unused:
        del model.graph.initializers[name]
    return len(unused)


def fuse_rms_norm(model: ir.Model) -> int:
    """The six nodes of a root-mean-square norm -> one RMSNormalization (ai.onnx 23)."""
    count = int(RMS_NORM.apply_to_model(model))
    common.RemoveUnusedNodesPass()(model)
    return count


def fuse_linear(model: ir.Model) -> int:
    """MatMul(x, Transpose(weight)) -> FusedMatMul(x, weight, transB=1).

    The weight stays in the checkpoint's layout, so that it can be streamed to disk unchanged and a
    tied embedding is one tensor; ONNX Runtime packs it when a session is created.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "MatMul" or (weight := _transposed_weight(node)) is None:
            continue
        _replace(node, "FusedMatMul", MICROSOFT, [node.inputs[0], weight], {"transB": 1})
        count += 1
    common.RemoveUnusedNodesPass()(model)
    if count:
        model.graph.opset_imports[MICROSOFT] = 1
    return count


def add_storage_casts(model: ir.Model, dtype: ir.DataType) -> int:
    """Store float32 weights as `dtype` and cast them back where they are read."""
    initializers = model.graph.initializers
    weights = [(name, v) for name, v in initializers.items() if v.const_value is None]
    for name, value in weights:
        stored = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
        # Taken out first: the container follows the names of what it holds.
        del initializers[name]
        value.name = f"{name}.float32"
        cast = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT}, outputs=[value])
        initializers[name] = stored
        model.graph.insert_before(model.graph[0], cast)
    return len(weights)


def drop_trace_notes(model: ir.Model) -> int:
    """Forget what the tracer noted on nodes, but for the module names: its stack traces hold paths
    of this machine, and would make a bundle's hash depend on where it was made."""
    count = 0
    for node in model.graph:
        for key in node.metadata_props.keys() - KEPT_NOTES:
            del node.metadata_props[key]
            count += 1
    model.graph.metadata_props.clear()
    return count


def scopes(node: ir.Node) -> list[str]:
    """Module names around a node, outermost first, as the tracer recorded them."""
    text = node.metadata_props.get(NAME_SCOPES, "[]")
    return [part.strip(" '\"") for part in text.strip("[]").split(",")]


def _transposed_weight(node: ir.Node) -> ir.Value | None:
    """The 2-D weight behind the second input, when that is its transpose."""
    value = node.inputs[1]
    transpose = value.producer() if value is not None else None
    if transpose is None or transpose.op_type != "Transpose":
        return None
    weight = transpose.inputs[0]
    perm = transpose.attributes.get("perm")
    swapped = perm is not None and list(perm.as_ints()) == [1, 0]
    return weight if weight is not None and weight.is_initializer() and swapped else None


def _replace(
    node: ir.Node, op_type: str, domain: str, inputs: list[Any], attributes: dict[str, Any]
) -> ir.Node:
    """Put a new node with the same output value in the place of `node`."""
    new = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=1)
    new.metadata_props.update(node.metadata_props)
    output, fresh = node.outputs[0], new.outputs[0]
    assert node.graph is not None
    fresh.name, fresh.shape, fresh.type = output.name, output.shape, output.type
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [new], [output], [fresh])
    return new


def external_weights(models: Iterable[ir.Model]) -> dict[str, ir.Value]:
    """Every weight that some graph reads, in the order of first use."""
    found: dict[str, ir.Value] = {}
    for model in models:
        for name, value in model.graph.initializers.items():
            if value.const_value is None:
                found.setdefault(name, value)
    return found
