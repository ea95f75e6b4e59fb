"""Rotary embedding as one node, where the attention operator cannot do it.

Longrope (Phi-3) has two sets of angles, and a row's final length says which. Both stand in one
table, the second after the first, and a row's positions are moved to its part of the table. The
attention of `runtime/kernels` rotates by the past length and takes no positions, so that one node
serves both graphs. Source: ONNX 23, RotaryEmbedding; LongRoPE, arXiv:2402.13753.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import initializer, int64s, make
from trtllm_lite.exporter.passes.positions import Choice, by_position, find_choice, find_positions
from trtllm_lite.exporter.passes.rotary import Rotation, one_of_each_pair, rotations, take_out
from trtllm_lite.exporter.passes.weights import add_table

Array = npt.NDArray[Any]


def fuse_rotary(model: ir.Model, length: int) -> int:
    """Rotations of queries and keys before an attention -> RotaryEmbedding nodes, two for each.

    They are by the positions 0 to length - 1, or by those and one choice a row. Returns the number
    of attention nodes. Comes after `fold_rotary`, which leaves what the attention cannot do.
    """
    made: dict[tuple[ir.Value, ir.Value, bool], _Tables | None] = {}
    count = 0
    for node in list(model.graph):
        if (found := rotations(node)) is None:
            continue
        key = found[0].cos, found[0].sin, found[0].interleaved
        if key not in made:
            made[key] = _tables(model, node, found[0], length, len(made))
        if (tables := made[key]) is not None:
            for side, rotation in enumerate(found):
                _put(node, side, rotation, tables)
            count += 1
    return count


@dataclass(frozen=True, eq=False)
class _Tables:
    """cos, sin: initializers [rows, angles]. rows: int64 [batch, seq], which row each token has."""

    cos: ir.Value
    sin: ir.Value
    rows: ir.Value
    angles: int


def _tables(
    model: ir.Model, before: ir.Node, rotation: Rotation, length: int, index: int
) -> _Tables | None:
    """Of one rotation; what makes the rows stands before its first attention node."""
    values = [rotation.cos, rotation.sin]
    choice = find_choice(model, values, length)
    if choice is None:
        parts = [by_position(model, values, length)]
    else:
        # A row that is shorter than `least` has no position beyond least - 2.
        parts = [
            by_position(model, values, choice.least - 1, choice.value, chosen=False),
            by_position(model, values, length, choice.value, chosen=True),
        ]
    stacked = _stacked(parts, interleaved=rotation.interleaved)
    positions = find_positions(model.graph)
    if stacked is None or positions is None:
        return None
    cos, sin = (
        add_table(model.graph, f"rotary.rows.{index}.{name}", table)
        for name, table in zip(("cos", "sin"), stacked, strict=True)
    )
    rows = positions if choice is None else _moved(before, positions, choice, index)
    return _Tables(cos, sin, rows, stacked[0].shape[1])


def _stacked(parts: list[list[Array] | None], *, interleaved: bool) -> tuple[Array, Array] | None:
    """Cosines and sines of all parts, [rows, angles] each; None when one is not known."""
    columns: tuple[list[Array], list[Array]] = ([], [])
    for part in parts:
        for column, full in zip(columns, part or (None, None), strict=True):
            numbers = None if full is None else one_of_each_pair(full, interleaved)
            if numbers is None:
                return None
            column.append(numbers)
    return np.concatenate(columns[0]), np.concatenate(columns[1])


def _moved(before: ir.Node, positions: ir.Value, choice: Choice, index: int) -> ir.Value:
    """Positions, and for rows with the second set the number of rows before it added."""
    graph = before.graph
    assert isinstance(graph, ir.Graph)
    first = initializer(graph, f"rotary.rows.{index}.first", np.array(choice.least - 1, np.int64))
    number = make(before, "Cast", [choice.value], {"to": ir.DataType.INT64}).outputs[0]
    offset = make(before, "Mul", [number, first]).outputs[0]
    column = make(before, "Unsqueeze", [offset, int64s(graph, [1])]).outputs[0]
    rows = make(before, "Add", [positions, column]).outputs[0]
    for value, name in ((number, "chosen"), (offset, "offset"), (column, "column"), (rows, "rows")):
        value.name, value.type = f"rotary.rows.{index}.{name}", positions.type
    rows.shape = positions.shape
    return rows


def _put(node: ir.Node, side: int, rotation: Rotation, tables: _Tables) -> None:
    """Rotate an input of the attention, queries or keys, [batch, seq, heads * head_dim]."""
    take_out(rotation)
    plain = node.inputs[side]
    assert plain is not None
    heads = node.attributes.get_int("kv_num_heads" if side else "num_heads")
    attributes = {
        "interleaved": int(rotation.interleaved),
        "num_heads": heads,
        "rotary_embedding_dim": 2 * tables.angles,
    }
    inputs = [plain, tables.cos, tables.sin, tables.rows]
    new = make(node, "RotaryEmbedding", inputs, attributes).outputs[0]
    new.name, new.type, new.shape = f"{plain.name}.rotated", plain.type, plain.shape
    node.replace_input_with(side, new)
