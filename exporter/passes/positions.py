"""Values of a graph that depend on nothing but the positions of the tokens, or on them and on one
choice a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxruntime as ort

from trtllm_lite.exporter.passes.edit import constant, dims

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Choice:
    """`value`, bool [batch]: whether a row's number in one graph input is at least `least`, which
    is positive."""

    value: ir.Value
    least: int


def find_positions(graph: ir.Graph) -> ir.Value | None:
    """[batch, seq] int64: a row's past length and on, clamped to its last token."""
    for node in graph:
        if node.op_type == "Min" and dims(node.outputs[0]) == ("batch", "seq"):
            return node.outputs[0]
    return None


def find_choice(model: ir.Model, values: Sequence[ir.Value], most: int) -> Choice | None:
    """The one choice between two ways in which `values` depend on positions, which a row's number
    in a graph input makes, of 0 to `most`; None when there is none, or more than one."""
    positions = find_positions(model.graph)
    if positions is None:
        return None
    found = [v for v in _ancestors(values, {positions}) if _is_row_choice(v)]
    numbers = [v for v in _ancestors(found, set()) if v.is_graph_input()]
    if len(found) != 1 or len(numbers) != 1 or not _need_only(found, set(numbers)):
        return None
    if dims(numbers[0]) != ("batch",) or numbers[0].dtype is None:
        return None
    rows = np.arange(most + 1, dtype=numbers[0].dtype.numpy())
    (chosen,) = _computed(model, found, {numbers[0]: rows}, len(rows), 1)
    least = int(np.argmax(chosen)) if chosen.any() else most + 1
    rising = not chosen[:least].any() and bool(chosen[least:].all())
    return Choice(found[0], least) if rising and least > 0 else None


def by_position(
    model: ir.Model,
    values: Sequence[ir.Value],
    length: int,
    choice: ir.Value | None = None,
    *,
    chosen: bool = False,
) -> list[Array] | None:
    """What the graph computes for `values` at positions 0 to length - 1 of one row; None when a
    value needs more than positions, and `choice` if there is one, which then is `chosen`."""
    positions = find_positions(model.graph)
    if positions is None:
        return None
    given = {positions: np.arange(length, dtype=np.int64)[None]}
    if choice is not None:
        given[choice] = np.array([chosen])
    if not _need_only(values, set(given)):
        return None
    return _computed(model, values, given, 1, length)


def _is_row_choice(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.BOOL and dims(value) == ("batch",)


def _ancestors(values: Sequence[ir.Value], stop: set[ir.Value]) -> set[ir.Value]:
    """The values, and all that they are made from, up to those in `stop`."""
    waiting, seen = list(values), set[ir.Value]()
    while waiting:
        value = waiting.pop()
        if value in seen or value in stop:
            continue
        seen.add(value)
        node = value.producer()
        if node is not None:
            waiting += [v for v in node.inputs if v is not None]
    return seen


def _need_only(values: Sequence[ir.Value], given: set[ir.Value]) -> bool:
    """True when the values are made from those given, constants and the shapes of inputs."""
    waiting, seen = list(values), set(given)
    while waiting:
        value = waiting.pop()
        if value in seen or constant(value) is not None:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            return False
        if node.op_type != "Shape" or not _is_input(node.inputs[0]):
            waiting += [v for v in node.inputs if v is not None]
    return True


def _is_input(value: ir.Value | None) -> bool:
    return value is not None and value.is_graph_input()


def _computed(
    model: ir.Model,
    values: Sequence[ir.Value],
    given: Mapping[ir.Value, Array],
    rows: int,
    length: int,
) -> list[Array]:
    """What the graph makes of the given numbers, for rows of `length` tokens."""
    part = _cut(model, values, list(given))
    numbers = {_given(str(v.name)): array for v, array in given.items()}
    feeds = {
        str(v.name): numbers[str(v.name)] if v.name in numbers else _example(v, rows, length)
        for v in part.graph.inputs
    }
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        ir.to_proto(part).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run([str(v.name) for v in values], feeds))


def _given(name: str) -> str:
    return f"given.{name}"


def _cut(model: ir.Model, values: Sequence[ir.Value], given: Sequence[ir.Value]) -> ir.Model:
    """A copy of the graph with those outputs, in which the given values are inputs."""
    part = model.clone()
    graph = part.graph
    made = {str(v.name): v for node in graph for v in node.outputs}
    made |= {str(v.name): v for v in graph.inputs}
    fresh = []
    for old in given:
        new = ir.Value(name=_given(str(old.name)), shape=old.shape, type=old.type)
        ir.convenience.replace_all_uses_with(made[str(old.name)], new)
        fresh.append(new)
    graph.outputs.clear()
    graph.outputs.extend(made[str(v.name)] for v in values)
    common.RemoveUnusedNodesPass()(part)
    for name in [n for n, v in graph.initializers.items() if not v.uses()]:
        del graph.initializers[name]
    for value in [v for v in graph.inputs if not v.uses()]:
        graph.inputs.remove(value)
    graph.inputs.extend(new for new in fresh if new.uses())
    return part


def _example(value: ir.Value, rows: int, length: int) -> Array:
    """An input of which only the shape is read."""
    assert value.dtype is not None
    sizes = [{"batch": rows, "seq": length}[str(d)] for d in dims(value) or ()]
    return np.zeros(sizes, value.dtype.numpy())
