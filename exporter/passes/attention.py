"""Attention that reads queries, keys and values as one packed projection."""

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims, int64s, make, only_reader, remove_dead, take_over


def pack_attention(model: ir.Model) -> int:
    """Attention over three neighbouring parts of a Split -> attention over that stretch itself."""
    return sum(_packed(n) for n in list(model.graph) if n.op_type == "GroupQueryAttention")


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
