"""Norms: one node each, together with the addition before it."""

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules.fusion import _rms_normalization

from trtllm_lite.exporter.passes.edit import (
    MICROSOFT,
    constant,
    dims,
    graph_of,
    integers,
    make,
    only_reader,
    producer,
    remove_dead,
    replace,
    take_over,
)
from trtllm_lite.exporter.passes.weights import offset_weight

RMS_NORM = RewriteRuleSet(_rms_normalization.rms_normalization_rules)
SKIP = {
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}
# The sum of the inputs is this output of the skip operators.
SUM = 3


def fuse_rms_norm(model: ir.Model) -> int:
    """The six nodes of a root-mean-square norm -> one RMSNormalization (ai.onnx 23)."""
    count = int(RMS_NORM.apply_to_model(model))
    common.RemoveUnusedNodesPass()(model)
    return count


def fuse_layer_norm(model: ir.Model) -> int:
    """RMSNormalization(x - mean(x)) -> LayerNormalization(x), with no bias."""
    count = 0
    for node in list(model.graph):
        if node.op_type != "RMSNormalization" or node.attributes.get_int("axis", -1) != -1:
            continue
        centred = producer(node.inputs[0], "Sub")
        mean = producer(centred.inputs[1], "ReduceMean") if centred is not None else None
        if centred is None or mean is None or mean.inputs[0] is not centred.inputs[0]:
            continue
        if integers(mean.inputs[1]) != [-1] or mean.attributes.get_int("keepdims", 1) != 1:
            continue
        attributes = {"axis": -1, "epsilon": _epsilon(node)}
        replace(node, "LayerNormalization", [mean.inputs[0], node.inputs[1]], attributes)
        remove_dead([centred])
        count += 1
    return count


def fold_offsets(model: ir.Model) -> int:
    """A weight plus a constant, as where a norm multiplies by 1 + w -> one weight."""
    count = 0
    for node in list(model.graph):
        for weight, number in _orders(node) if node.op_type == "Add" else ():
            if (offset := _offset(weight, number)) is not None:
                _fold_offset(node, weight, offset)
                count += 1
    return count


def _fold_offset(add: ir.Node, weight: ir.Value, offset: float) -> None:
    ir.convenience.replace_all_uses_with(
        add.outputs[0], offset_weight(graph_of(add), weight, offset)
    )
    remove_dead([add])


def _orders(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    a, b = node.inputs
    return [] if a is None or b is None else [(a, b), (b, a)]


def _offset(weight: ir.Value, number: ir.Value) -> float | None:
    """The constant that is added to a weight without data which nothing else reads."""
    numbers = constant(number)
    own = weight.is_initializer() and weight.const_value is None and len(list(weight.uses())) == 1
    return float(numbers.reshape(())) if own and numbers is not None and numbers.size == 1 else None


def fuse_skip_norm(model: ir.Model) -> int:
    """Add, and the norm of the sum -> one skip norm, which also gives the sum to other readers.

    A bias that was added to one of the summands goes in as well.
    Source: ONNX Runtime, docs/ContribOperators.md, com.microsoft.SkipLayerNormalization.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type in SKIP and _is_over_last_axis(node):
            add = producer(node.inputs[0], "Add")
            if add is not None and _is_residual(add):
                _fuse_skip(node, add)
                count += 1
    if count:
        # A reader of the sum may stand before the norm.
        model.graph.sort()
    return count


def _fuse_skip(norm: ir.Node, add: ir.Node) -> None:
    total, (a, b) = add.outputs[0], add.inputs
    inputs, bias = [a, b], None
    for side, value in enumerate(add.inputs):
        biased = _biased(value)
        if biased is not None and bias is None:
            inputs[side], bias = biased
    inputs += [norm.inputs[1]]
    if norm.op_type == "LayerNormalization":
        inputs += [norm.inputs[2] if len(norm.inputs) > 2 else None]
    more = [bias] if bias is not None else []
    shared = len(list(total.uses())) > 1 or total.is_graph_output()
    new = make(
        norm,
        SKIP[norm.op_type],
        [*inputs, *more],
        {"epsilon": _epsilon(norm)},
        MICROSOFT,
        num_outputs=SUM + 1 if shared else 1,
    )
    # It ends the layer that the addition ends.
    new.metadata_props.update(add.metadata_props)
    take_over(norm.outputs[0], new.outputs[0])
    if shared:
        for unread in new.outputs[1:SUM]:
            unread.name = ""
        norm.replace_input_with(0, None)
        take_over(total, new.outputs[SUM])
    remove_dead([norm, add])


def _is_over_last_axis(node: ir.Node) -> bool:
    """A norm of the last axis whose weights have that one axis."""
    weights = [dims(value) for value in node.inputs[1:]]
    plain = all(weight is not None and len(weight) == 1 for weight in weights)
    return plain and node.attributes.get_int("axis", -1) == -1


def _is_residual(add: ir.Node) -> bool:
    """An addition of two hidden states, [batch, seq, hidden]."""
    a, b = (dims(value) for value in add.inputs)
    return a is not None and a == b and len(a) == 3


def _biased(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """A summand without the bias that was added to it, and that bias [hidden]."""
    add = producer(value, "Add")
    if add is None or value is None or only_reader(value, "Add") is None:
        return None
    for plain, bias in ((add.inputs[0], add.inputs[1]), (add.inputs[1], add.inputs[0])):
        if plain is None or bias is None or not bias.is_initializer() or constant(bias) is not None:
            continue
        shape = dims(value)
        if shape is not None and dims(plain) == shape and dims(bias) == shape[-1:]:
            return plain, bias
    return None


def _epsilon(node: ir.Node) -> float:
    return node.attributes.get_float("epsilon", 1e-5)
