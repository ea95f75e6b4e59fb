"""The positions whose logits are wanted, picked before what only they need."""

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import (
    dims,
    graph_of,
    make,
    producer,
    remove_dead,
    replace,
)

# Nodes that treat every token alike, given weights that have no tokens.
TOKEN_WISE = frozenset(
    {
        "Add",
        "Div",
        "FusedMatMul",
        "Gelu",
        "LayerNormalization",
        "MatMul",
        "Mul",
        "QuickGelu",
        "RMSNormalization",
        "Relu",
        "Sigmoid",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "Split",
        "Tanh",
    }
)


def pick_tokens(model: ir.Model) -> int:
    """GatherElements along the tokens with one index for all channels -> GatherND."""
    count = 0
    for node in list(model.graph):
        if node.op_type != "GatherElements" or node.attributes.get_int("axis", 0) != 1:
            continue
        expand = producer(node.inputs[1], "Expand")
        index = producer(expand.inputs[0], "Unsqueeze") if expand is not None else None
        wanted = index.inputs[0] if index is not None else None
        if expand is None or index is None or wanted is None or not wanted.is_graph_input():
            continue
        replace(node, "GatherND", [node.inputs[0], index.outputs[0]], {"batch_dims": 1})
        remove_dead([expand])
        count += 1
    return count


def hoist_tokens(model: ir.Model) -> int:
    """Pick the tokens before the last nodes that treat every token alike, so that these compute
    only what is wanted: all that follows the last attention. Returns the number of such nodes."""
    picks = [node for node in model.graph if node.op_type == "GatherND"]
    return sum(_hoist(pick) for pick in picks)


def _hoist(pick: ir.Node) -> int:
    moved = _only_for(pick)
    if not moved:
        return 0
    graph, index = graph_of(pick), pick.inputs[1]
    earliest = next(node for node in graph if node in moved)
    made = producer(index, "Unsqueeze")
    if made is None:
        return 0
    graph.remove(made)
    graph.insert_before(earliest, made)
    picked: dict[ir.Value, ir.Value] = {}
    for node in [n for n in graph if n in moved]:
        for at, value in enumerate(node.inputs):
            if value is not None and value.producer() not in moved and _has_tokens(value):
                if value not in picked:
                    picked[value] = _picked(node, value, pick)
                node.replace_input_with(at, picked[value])
        for value in node.outputs:
            value.shape = _fewer(value, pick)
    source = pick.inputs[0]
    assert source is not None
    ir.convenience.replace_all_uses_with(pick.outputs[0], source)
    remove_dead([pick])
    return len(moved)


def _only_for(pick: ir.Node) -> set[ir.Node]:
    """The nodes that treat every token alike and that nothing reads but `pick` and each other."""
    moved = set[ir.Node]()
    for node in reversed(graph_of(pick)):
        readers = {use.node for value in node.outputs for use in value.uses()}
        outside = any(value.is_graph_output() for value in node.outputs)
        if readers and not outside and readers <= {pick, *moved} and _is_token_wise(node):
            moved.add(node)
    return moved


def _is_token_wise(node: ir.Node) -> bool:
    if node.op_type not in TOKEN_WISE or node.attributes.get_int("axis", -1) not in (-1, 2):
        return False
    values = [value for value in node.inputs if value is not None]
    tokens = [value for value in values if _has_tokens(value)]
    others = [dims(value) for value in values if not _has_tokens(value)]
    if "MatMul" in node.op_type and tokens != values[:1]:
        return False
    flat = "MatMul" in node.op_type or all(o is not None and len(o) <= 1 for o in others)
    return bool(tokens) and flat


def _has_tokens(value: ir.Value) -> bool:
    shape = dims(value)
    return shape is not None and len(shape) == 3 and shape[:2] == ("batch", "seq")


def _picked(before: ir.Node, value: ir.Value, pick: ir.Node) -> ir.Value:
    new = make(before, "GatherND", [value, pick.inputs[1]], {"batch_dims": 1})
    made = new.outputs[0]
    made.name, made.type, made.shape = f"{value.name}.picked", value.type, _fewer(value, pick)
    return made


def _fewer(value: ir.Value, pick: ir.Node) -> ir.Shape | None:
    """The shape of a value with the picked tokens only."""
    tokens = pick.outputs[0].shape
    if value.shape is None or tokens is None:
        return None
    return ir.Shape([*tokens[:2], *value.shape[2:]])
