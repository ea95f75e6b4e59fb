"""Reshapes and transposes that do nothing, and shapes that need no arithmetic."""

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import (
    dims,
    int64s,
    integers,
    make,
    only_reader,
    producer,
    remove_dead,
    take_over,
)

NORMS = ("RMSNormalization", "LayerNormalization")


def simplify_layouts(model: ir.Model) -> int:
    """Remove transposes and reshapes that undo each other, also around a norm over the last axis,
    and give the reshapes that stay a constant shape. Returns the number of changes."""
    count, found = 0, 1
    while found:
        found = sum(_simplified(node) for node in list(model.graph) if node.graph is not None)
        count += found
    return count + sum(_made_constant(node) for node in list(model.graph))


def split_slices(model: ir.Model) -> int:
    """Slices of one value that tile its last axis -> one Split."""
    tiles: dict[ir.Value, list[tuple[int, int, ir.Node]]] = {}
    for node in model.graph:
        if (cut := last_axis_slice(node)) is not None:
            data, start, stop, step = cut
            if step == 1:
                tiles.setdefault(data, []).append((start, stop, node))
    return sum(_split(model.graph, cuts) for cuts in tiles.values())


def last_axis_slice(node: ir.Node | None) -> tuple[ir.Value, int, int, int] | None:
    """What a Slice of constant bounds along the last axis takes: value, start, stop, step."""
    if node is None or node.op_type != "Slice" or len(node.inputs) < 4:
        return None
    data, shape = node.inputs[0], dims(node.inputs[0])
    numbers = [integers(value) for value in node.inputs[1:]]
    numbers += [[1]] * (4 - len(numbers))
    if data is None or shape is None or any(n is None or len(n) != 1 for n in numbers):
        return None
    start, stop, axis, step = (n[0] for n in numbers if n is not None)
    size = shape[-1]
    if axis not in (-1, len(shape) - 1) or not isinstance(size, int) or min(start, stop) < 0:
        return None
    return data, min(start, size), min(stop, size), step


def perm(node: ir.Node) -> list[int]:
    """The permutation of a Transpose."""
    return list(node.attributes["perm"].as_ints())


def _split(graph: ir.Graph, cuts: list[tuple[int, int, ir.Node]]) -> bool:
    ordered = sorted(cuts, key=lambda cut: cut[0])
    # Asked anew: it may be a slice that has just become a part of another Split.
    data = cuts[0][2].inputs[0]
    shape = dims(data)
    ends = [0, *(stop for _, stop, _ in ordered)]
    tiled = all(start == end for (start, _, _), end in zip(ordered, ends[:-1], strict=True))
    if len(cuts) < 2 or not tiled or shape is None or ends[-1] != shape[-1]:
        return False
    sizes = int64s(graph, [stop - start for start, stop, _ in ordered])
    first = cuts[0][2]
    split = make(first, "Split", [data, sizes], {"axis": -1}, num_outputs=len(cuts))
    for (_, _, node), part in zip(ordered, split.outputs, strict=True):
        take_over(node.outputs[0], part)
        remove_dead([node])
    return True


def _simplified(node: ir.Node) -> bool:
    if node.op_type == "Transpose":
        return _transpose(node)
    return node.op_type == "Reshape" and _reshape(node)


def _transpose(node: ir.Node) -> bool:
    before = producer(node.inputs[0], "Transpose")
    if before is not None and _is_inverse(before, node):
        _bypass(node, before.inputs[0])
        return True
    return _transpose_around_norm(node)


def _transpose_around_norm(node: ir.Node) -> bool:
    """Transpose(Norm(Transpose(x))) -> Norm(x): the norm is over the last axis, which stays."""
    norm = producer(node.inputs[0], *NORMS)
    if norm is None or only_reader(norm.outputs[0], "Transpose") is None:
        return False
    before = producer(norm.inputs[0], "Transpose")
    axis = norm.attributes.get_int("axis", -1)
    weights = [dims(value) for value in norm.inputs[1:]]
    if before is None or axis != -1 or any(w is None or len(w) != 1 for w in weights):
        return False
    if not _is_inverse(before, node) or perm(node)[-1] != len(perm(node)) - 1:
        return False
    norm.replace_input_with(0, before.inputs[0])
    norm.outputs[0].shape = node.outputs[0].shape
    _bypass(node, norm.outputs[0])
    remove_dead([before])
    return True


def _is_inverse(first: ir.Node, second: ir.Node) -> bool:
    order = perm(first)
    return [order[axis] for axis in perm(second)] == list(range(len(order)))


def _reshape(node: ir.Node) -> bool:
    """One that keeps the shape, or that follows another one."""
    source, shape = node.inputs[0], dims(node.outputs[0])
    before = producer(source, "Reshape")
    first = before.inputs[0] if before is not None else source
    for value in (source, first):
        if shape is not None and dims(value) == shape:
            _bypass(node, value)
            return True
    # A zero means a dimension of the input, which would be another one's.
    if before is None or 0 in (integers(node.inputs[1]) or ()):
        return False
    node.replace_input_with(0, first)
    remove_dead([before])
    return True


def _bypass(node: ir.Node, source: ir.Value | None) -> None:
    """Readers of the node's output read `source` instead."""
    assert source is not None
    ir.convenience.replace_all_uses_with(node.outputs[0], source)
    remove_dead([node])


def _made_constant(node: ir.Node) -> bool:
    """Leading dimensions that a Reshape keeps are 0 in its shape, the others are known."""
    if node.op_type != "Reshape" or producer(node.inputs[1], "Concat") is None:
        return False
    before, after = dims(node.inputs[0]), dims(node.outputs[0])
    if before is None or after is None:
        return False
    kept = 0
    while kept < min(len(before), len(after)) and before[kept] == after[kept]:
        kept += 1
    rest = [d for d in after[kept:] if isinstance(d, int)]
    if len(rest) != len(after) - kept:
        return False
    old = node.inputs[1]
    assert isinstance(node.graph, ir.Graph)
    node.replace_input_with(1, int64s(node.graph, [0] * kept + rest))
    node.attributes.pop("allowzero", None)
    remove_dead([p for p in [producer(old, "Concat")] if p is not None])
    return True
