"""Constant folding, and the local simplifications that go with it."""

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
