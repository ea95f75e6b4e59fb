"""Rotary embedding, moved from the graph into the attention operator.

The operator rotates queries and keys itself, by the tables of cosines and sines of all positions.
Source: RoFormer, arXiv:2104.09864; ONNX Runtime, com.microsoft.GroupQueryAttention, `do_rotary`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims, only_reader, producer, remove_dead
from trtllm_lite.exporter.passes.layout import last_axis_slice, perm
from trtllm_lite.exporter.passes.positions import by_position
from trtllm_lite.exporter.passes.weights import add_table

# What the operator takes: cosines and sines for a multiple of this many angles, in heads of a
# multiple of twice as many elements.
ANGLES = 8
PAST_KEY, COS, SIN = 3, 7, 8

Array = npt.NDArray[Any]


def fold_rotary(model: ir.Model, length: int) -> int:
    """Attention over queries and keys that were rotated by position -> attention that rotates.

    length: positions run from 0 to length - 1, which is as long as the tables get. Returns the
    number of attention nodes that rotate. A rotation by more than the position (longrope's, by the
    row's final length) stays in the graph, and so does one by a number of angles, or of heads of a
    size, that the operator does not take.
    """
    tables: dict[tuple[ir.Value, ir.Value, bool], tuple[ir.Value, ir.Value] | None] = {}
    count = 0
    for node in list(model.graph):
        if (found := rotations(node)) is None or not _takes_head(node):
            continue
        key = found[0].cos, found[0].sin, found[0].interleaved
        if key not in tables:
            tables[key] = _tables(model, *key, length, len(tables))
        if (pair := tables[key]) is not None:
            _fold(node, found, pair)
            count += 1
    return count


@dataclass(frozen=True)
class Rotation:
    """`source` [batch, heads, seq, head_dim] rotated: x cos + turned(x) sin, on the first elements
    of each head. `reader` is the Transpose that takes the result to the operator, by a Reshape.

    interleaved: pairs are neighbours; otherwise the first half of the elements with the second.
    """

    source: ir.Value
    cos: ir.Value
    sin: ir.Value
    interleaved: bool
    reader: ir.Node | None = None


def rotations(node: ir.Node) -> tuple[Rotation, Rotation] | None:
    """Of the queries and keys of an attention node, when both are rotated alike."""
    if node.op_type != "GroupQueryAttention":
        return None
    q, k = (_operand(value) for value in node.inputs[:2])
    if q is None or k is None:
        return None
    alike = (q.cos, q.sin, q.interleaved) == (k.cos, k.sin, k.interleaved)
    return (q, k) if alike else None


def _takes_head(node: ir.Node) -> bool:
    past = dims(node.inputs[PAST_KEY])
    return past is not None and int(past[-1]) % (2 * ANGLES) == 0


def _operand(value: ir.Value | None) -> Rotation | None:
    reshape = producer(value, "Reshape")
    transpose = producer(reshape.inputs[0], "Transpose") if reshape is not None else None
    if transpose is None or perm(transpose) != [0, 2, 1, 3]:
        return None
    if only_reader(transpose.outputs[0], "Reshape") is None:
        return None
    found = _whole(transpose.inputs[0]) or _partial(transpose.inputs[0])
    if found is None:
        return None
    return Rotation(found.source, found.cos, found.sin, found.interleaved, transpose)


def _partial(value: ir.Value | None) -> Rotation | None:
    """Concat of the first elements of each head, rotated, and of the others."""
    concat = producer(value, "Concat")
    if concat is None or len(concat.inputs) != 2:
        return None
    inner = _whole(concat.inputs[0])
    head = last_axis_slice(inner.source.producer()) if inner is not None else None
    rest = last_axis_slice(producer(concat.inputs[1], "Slice"))
    if inner is None or head is None or rest is None or head[0] is not rest[0]:
        return None
    if (head[1], head[3], rest[3]) != (0, 1, 1) or head[2] != rest[1] or rest[2] != _size(rest[0]):
        return None
    return Rotation(head[0], inner.cos, inner.sin, inner.interleaved)


def _whole(value: ir.Value | None) -> Rotation | None:
    """Add(Mul(x, cos), Mul(turned(x), sin)), in any order of operands."""
    add = producer(value, "Add")
    if add is None:
        return None
    for straight, turned in _orders(add):
        for x, cos in _orders(producer(straight, "Mul")):
            for t, sin in _orders(producer(turned, "Mul")):
                interleaved = _turned(t, x)
                if interleaved is not None:
                    return Rotation(x, cos, sin, interleaved)
    return None


def _orders(node: ir.Node | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    if node is not None:
        a, b = node.inputs
        if a is not None and b is not None:
            yield a, b
            yield b, a


def _turned(value: ir.Value, x: ir.Value) -> bool | None:
    """Whether `value` is x with its pairs turned by 90 degrees: False for pairs of halves, True
    for pairs of neighbours, None when it is something else."""
    size = _size(x)
    concat = producer(value, "Concat")
    if concat is not None and len(concat.inputs) == 2:
        minus, plus = producer(concat.inputs[0], "Neg"), producer(concat.inputs[1], "Slice")
        high = last_axis_slice(producer(minus.inputs[0], "Slice")) if minus is not None else None
        halves = [(x, size // 2, size, 1), (x, 0, size // 2, 1)]
        return False if [high, last_axis_slice(plus)] == halves else None
    reshape = producer(value, "Reshape")
    stack = producer(reshape.inputs[0], "Concat") if reshape is not None else None
    if stack is None or len(stack.inputs) != 2 or dims(value) != dims(x):
        return None
    odd, even = (producer(v, "Unsqueeze") for v in stack.inputs)
    minus = producer(odd.inputs[0], "Neg") if odd is not None else None
    if minus is None or even is None:
        return None
    pairs = [last_axis_slice(producer(n.inputs[0], "Slice")) for n in (minus, even)]
    return True if pairs == [(x, 1, size, 2), (x, 0, size, 2)] else None


def _size(value: ir.Value) -> int:
    shape = dims(value)
    return shape[-1] if shape is not None and isinstance(shape[-1], int) else 0


def _tables(
    model: ir.Model, cos: ir.Value, sin: ir.Value, interleaved: bool, length: int, index: int
) -> tuple[ir.Value, ir.Value] | None:
    """Initializers [length, angles] of what the graph computes for each position."""
    found = by_position(model, [cos, sin], length)
    pairs = [one_of_each_pair(full, interleaved) for full in found or ()]
    made = []
    for name, numbers in zip(("cos", "sin"), pairs, strict=False):
        if numbers is None or numbers.shape[1] % ANGLES:
            return None
        made.append(add_table(model.graph, f"rotary.{index}.{name}", numbers))
    return (made[0], made[1]) if made else None


def one_of_each_pair(full: Array, interleaved: bool) -> Array | None:
    """[1, 1, length, 2 angles] -> [length, angles], when both of each pair are equal."""
    flat = full.reshape(full.shape[-2], full.shape[-1])
    half = flat.shape[1] // 2
    first, second = (
        (flat[:, 0::2], flat[:, 1::2]) if interleaved else (flat[:, :half], flat[:, half:])
    )
    return np.ascontiguousarray(first) if np.array_equal(first, second) else None


def take_out(rotation: Rotation) -> None:
    """Let the reader have what is not rotated."""
    assert rotation.reader is not None
    rotated = rotation.reader.inputs[0]
    rotation.reader.replace_input_with(0, rotation.source)
    remove_dead([p for p in [rotated.producer() if rotated is not None else None] if p])


def _fold(
    node: ir.Node, found: tuple[Rotation, Rotation], tables: tuple[ir.Value, ir.Value]
) -> None:
    for rotation in found:
        take_out(rotation)
    node.replace_input_with(COS, tables[0])
    node.replace_input_with(SIN, tables[1])
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    node.attributes["rotary_interleaved"] = ir.AttrInt64(
        "rotary_interleaved", int(found[0].interleaved)
    )
