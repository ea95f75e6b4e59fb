"""A graph for several tokens a row -> the graph for one token a row."""

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims, remove_dead
from trtllm_lite.exporter.passes.place import Place
from trtllm_lite.exporter.passes.positions import find_positions

INT64 = ir.DataType.INT64
ONE = frozenset({"seq", "num_logits"})


def take_one_token(model: ir.Model) -> int:
    """Positions become past_lens, and the picking of tokens goes. Returns how many of the two were
    found. Inputs that nothing reads any more stay for `drop_unread_inputs`."""
    graph = model.graph
    positions = find_positions(graph)
    count = 0
    if positions is not None:
        _from_past(graph, positions)
        count += 1
    for pick in [node for node in graph if node.op_type == "GatherND"]:
        source = pick.inputs[0]
        assert source is not None
        ir.convenience.replace_all_uses_with(pick.outputs[0], source)
        remove_dead([pick])
        count += 1
    for node in graph:
        for value in node.outputs:
            _fix(value)
    for value in (*graph.inputs, *graph.outputs):
        _fix(value)
    return count


def drop_unread_inputs(model: ir.Model) -> int:
    """Remove the graph inputs that no node reads."""
    unread = [value for value in model.graph.inputs if not value.uses()]
    for value in unread:
        model.graph.inputs.remove(value)
    return len(unread)


def _from_past(graph: ir.Graph, positions: ir.Value) -> None:
    """[batch, 1] int64."""
    old = positions.producer()
    assert old is not None
    place = Place(old)
    past = next(value for value in graph.inputs if value.name == "past_lens")
    wide = place.op("Cast", past, dtype=INT64, shape=("batch",), to=INT64)
    column = place.op("Unsqueeze", wide, place.ints(1), shape=("batch", 1))
    ir.convenience.replace_all_uses_with(positions, column)
    remove_dead([old])


def _fix(value: ir.Value) -> None:
    size = dims(value)
    if size is not None:
        value.shape = ir.Shape([1 if d in ONE else d for d in size])
