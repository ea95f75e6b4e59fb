"""Projections that give each head's queries, keys and values together."""

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import (
    dims,
    int64s,
    make,
    only_reader,
    producer,
    remove_dead,
    take_over,
)
from trtllm_lite.exporter.passes.layout import perm
from trtllm_lite.exporter.passes.linear import Linear, linears

HEADS_FIRST = [0, 2, 1, 3]


def regroup_heads(model: ir.Model) -> int:
    """A product [.., heads * parts * dim] of which each head is split into equal parts -> one with
    all heads of the first part first, and so on, which is split as a whole.

    The rows of the weight, and of the bias, change places on their way to disk. Returns the number
    of products. GPT-NeoX stores queries, keys and values so.
    """
    found = [(linear, split) for linear in linears(model.graph) if (split := _split(linear))]
    for linear, split in found:
        _regroup(linear, split)
    return len(found)


def _split(linear: Linear) -> ir.Node | None:
    """The Split of each head, when the product goes there by a Reshape and a Transpose alone."""
    reshape = only_reader(linear.output, "Reshape")
    transpose = only_reader(reshape.outputs[0], "Transpose") if reshape is not None else None
    if reshape is None or transpose is None or perm(transpose) != HEADS_FIRST:
        return None
    split = only_reader(transpose.outputs[0], "Split")
    before, after = dims(linear.output), dims(reshape.outputs[0])
    if split is None or before is None or after is None or after[:2] != before[:2]:
        return None
    last = split.attributes.get_int("axis", 0) in (-1, 3)
    widths = {shape[-1] if (shape := dims(v)) is not None else None for v in split.outputs}
    known = len(after) == 4 and all(isinstance(d, int) for d in after[2:])
    return split if last and known and len(widths) == 1 and linear.is_single else None


def _regroup(linear: Linear, split: ir.Node) -> None:
    transpose = split.inputs[0].producer() if split.inputs[0] is not None else None
    reshape = producer(transpose.inputs[0], "Reshape") if transpose is not None else None
    assert transpose is not None
    assert reshape is not None
    shape = dims(reshape.outputs[0])
    assert shape is not None
    heads, parts = int(shape[2]), len(split.outputs)
    dim = int(shape[3]) // parts
    linear.regroup(heads, parts, dim)
    graph = split.graph
    assert isinstance(graph, ir.Graph)
    sizes = int64s(graph, [heads * dim] * parts)
    whole = make(split, "Split", [linear.output, sizes], {"axis": -1}, num_outputs=parts)
    apart = int64s(graph, [0, 0, heads, dim])
    for old, fresh in zip(split.outputs, whole.outputs, strict=True):
        fresh.name, fresh.type = f"{old.name}.whole", old.type
        fresh.shape = ir.Shape([*shape[:2], heads * dim])
        view = make(split, "Reshape", [fresh, apart]).outputs[0]
        view.name, view.type = f"{old.name}.heads", old.type
        view.shape = ir.Shape([*shape[:2], heads, dim])
        take_over(old, make(split, "Transpose", [view], {"perm": HEADS_FIRST}).outputs[0])
    remove_dead([split])
