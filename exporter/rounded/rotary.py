"""The rotation inside of an attention as nodes of its own.

Source: ONNX Runtime, docs/ContribOperators.md, com.microsoft.GroupQueryAttention; ONNX 23,
RotaryEmbedding.
"""

from collections.abc import Sequence

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims, int64s
from trtllm_lite.exporter.passes.place import Place

INT64 = ir.DataType.INT64
QUERY, KEY, VALUE, PAST_KEY, COS, SIN = 0, 1, 2, 3, 7, 8


def unfold_rotary(model: ir.Model) -> int:
    """GroupQueryAttention that rotates -> RotaryEmbedding of queries and keys, and one that does
    not. A row's tokens have the positions from `past_lens` on. Returns the number of nodes."""
    nodes = [n for n in model.graph if n.op_type == "GroupQueryAttention" and _rotates(n)]
    if nodes:
        positions = _positions(model.graph, Place(nodes[0], in_module=False))
        for node in nodes:
            _unfold(node, positions)
    return len(nodes)


def _rotates(node: ir.Node) -> bool:
    return node.attributes.get_int("do_rotary", 0) != 0


def _positions(graph: ir.Graph, place: Place) -> ir.Value:
    """int64 [batch, seq]."""
    ids, past = (next(v for v in graph.inputs if v.name == n) for n in ("input_ids", "past_lens"))
    count = place.op("Shape", ids, dtype=INT64, start=1, end=2)
    end = place.op("Squeeze", count, place.ints(0))
    zero, one = (place.op("Squeeze", place.ints(n), place.ints(0)) for n in (0, 1))
    steps = place.op("Range", zero, end, one)
    begin = place.op("Cast", past, dtype=INT64, to=INT64)
    return place.op("Add", place.op("Unsqueeze", begin, place.ints(1)), steps)


def _unfold(node: ir.Node, positions: ir.Value) -> None:
    place = Place(node)
    heads, kv_heads = (node.attributes.get_int(name) for name in ("num_heads", "kv_num_heads"))
    cos, sin = node.inputs[COS], node.inputs[SIN]
    angles, past = dims(cos), dims(node.inputs[PAST_KEY])
    assert angles is not None
    assert past is not None
    size = int(past[-1])
    if node.inputs[KEY] is None:
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        for index, part in enumerate(_split(node, sizes)):
            node.replace_input_with(index, part)
    interleaved = node.attributes.get_int("rotary_interleaved", 0)
    for index, count in ((QUERY, heads), (KEY, kv_heads)):
        plain = node.inputs[index]
        rotated = place.op(
            "RotaryEmbedding",
            plain,
            cos,
            sin,
            positions,
            interleaved=interleaved,
            num_heads=count,
            rotary_embedding_dim=2 * int(angles[1]),
        )
        node.replace_input_with(index, rotated)
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 0)
    node.replace_input_with(COS, None)
    node.replace_input_with(SIN, None)


def _split(node: ir.Node, sizes: Sequence[int]) -> Sequence[ir.Value]:
    """Queries, keys and values, which stand one behind the other in the last dimension."""
    packed, graph = node.inputs[QUERY], node.graph
    assert packed is not None
    assert isinstance(graph, ir.Graph)
    inputs = [packed, int64s(graph, sizes)]
    new = ir.node("Split", inputs, {"axis": -1}, num_outputs=len(sizes))
    new.metadata_props.update(node.metadata_props)
    graph.insert_before(node, new)
    for output in new.outputs:
        output.type = packed.type
    return new.outputs
