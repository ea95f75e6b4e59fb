"""Attention that reads one packed projection, and scales its scores itself."""

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import (
    constant,
    dims,
    int64s,
    make,
    only_reader,
    producer,
    remove_dead,
    take_over,
)


def pack_attention(model: ir.Model) -> int:
    """Attention over three neighbouring parts of a Split -> attention over that stretch itself."""
    return sum(_packed(n) for n in list(model.graph) if n.op_type == "GroupQueryAttention")


def fold_scale(model: ir.Model) -> int:
    """Attention over queries that were multiplied by a number -> attention that scales by it.

    OPT scales its queries. Returns the number of attention nodes.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "GroupQueryAttention" or (found := _scaled(node)) is None:
            continue
        product, plain, number = found
        node.replace_input_with(0, plain)
        scale = node.attributes.get_float("scale") * number
        node.attributes["scale"] = ir.AttrFloat32("scale", scale)
        remove_dead([product])
        count += 1
    return count


def _scaled(node: ir.Node) -> tuple[ir.Node, ir.Value, float] | None:
    """The Mul that makes the queries, what it multiplies, and by which number."""
    product = producer(node.inputs[0], "Mul")
    # A scale of 0 stands for the operator's own.
    if product is None or not node.attributes.get_float("scale", 0.0):
        return None
    if only_reader(product.outputs[0], node.op_type) is None:
        return None
    for plain, factor in (product.inputs, reversed(product.inputs)):
        numbers = constant(factor)
        if plain is not None and numbers is not None and numbers.size == 1 and numbers.any():
            return product, plain, float(numbers.reshape(()))
    return None


def _packed(node: ir.Node) -> bool:
    parts = node.inputs[:3]
    split = parts[0].producer() if parts[0] is not None else None
    if split is None or split.op_type != "Split":
        return False
    at = split.outputs.index(parts[0])
    alone = all(v is not None and only_reader(v, node.op_type) for v in parts)
    if list(parts) != list(split.outputs[at : at + 3]) or not alone:
        return False
    node.replace_input_with(0, _stretch(split, at))
    node.replace_input_with(1, None)
    node.replace_input_with(2, None)
    remove_dead([split])
    return True


def _stretch(split: ir.Node, at: int) -> ir.Value:
    """Three outputs of a Split as one value."""
    source, sizes = split.inputs[0], [_width(v) for v in split.outputs]
    assert source is not None
    if len(sizes) == 3:
        return source
    merged = [*sizes[:at], sum(sizes[at : at + 3]), *sizes[at + 3 :]]
    assert isinstance(split.graph, ir.Graph)
    new = make(
        split,
        "Split",
        [source, int64s(split.graph, merged)],
        {"axis": -1},
        num_outputs=len(merged),
    )
    for old, fresh in zip(
        [*split.outputs[:at], *split.outputs[at + 3 :]],
        [*new.outputs[:at], *new.outputs[at + 1 :]],
        strict=True,
    ):
        take_over(old, fresh)
    whole = new.outputs[at]
    whole.name, whole.type = f"{split.outputs[at].name}.qkv", source.type
    if source.shape is not None:
        whole.shape = ir.Shape([*source.shape[:-1], merged[at]])
    return whole


def _width(value: ir.Value) -> int:
    shape = dims(value)
    assert shape is not None
    return int(shape[-1])
