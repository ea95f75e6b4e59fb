"""Initializers without data: which there are, what they are made of, how they are stored."""

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trtllm_lite.exporter.arrangement import Arrangement
from trtllm_lite.exporter.passes.edit import initializer

PARTS = "trtllm_lite.parts"
ARRANGED = "trtllm_lite.arranged"
OFFSET = "trtllm_lite.offset"
TABLE = "trtllm_lite.table"


def external_weights(models: Iterable[ir.Model]) -> dict[str, ir.Value]:
    """Every weight that some graph reads, in the order of first use."""
    found: dict[str, ir.Value] = {}
    for model in models:
        for name, value in model.graph.initializers.items():
            if value.const_value is None:
                found.setdefault(name, value)
    return found


def weight_parts(value: ir.Value) -> tuple[str, ...]:
    """The parameters whose rows, one after the other, are this weight."""
    noted = value.metadata_props.get(PARTS)
    return (str(value.name),) if noted is None else tuple(json.loads(noted))


def pack_weights(graph: ir.Graph, parts: Sequence[ir.Value]) -> ir.Value:
    """One weight without data that stacks the rows of several, which nothing else may read.

    Its name is theirs joined by "+"; `weight_parts` tells them.
    """
    names = [name for part in parts for name in weight_parts(part)]
    shapes = [part.shape.numpy() for part in parts if part.shape is not None]
    rows = sum(int(shape[0]) for shape in shapes)
    name = "+".join(names)
    packed = ir.Value(name=name, shape=ir.Shape([rows, *shapes[0][1:]]), type=parts[0].type)
    packed.metadata_props[PARTS] = json.dumps(names)
    _note(packed, {n: a for part in parts for n, a in weight_arrangements(part).items()})
    for part in parts:
        del graph.initializers[str(part.name)]
    graph.initializers[name] = packed
    return packed


def arrange_weight(
    weight: ir.Value, seen_as: Sequence[int], perm: Sequence[int], shape: Sequence[int]
) -> None:
    """Put the elements of a weight without data, which one node reads, in another order, in place;
    `is_single` has to be true of it.

    It becomes the parameter seen as `seen_as`, its axes permuted by `perm`, in the new `shape`.
    """
    assert is_single(weight)
    (name,) = weight_parts(weight)
    _note(weight, {name: Arrangement(tuple(seen_as), tuple(perm))})
    weight.shape = ir.Shape(list(shape))


def is_single(weight: ir.Value) -> bool:
    """Whether a weight is one parameter, in the order of its elements."""
    return len(weight_parts(weight)) == 1 and not weight_arrangements(weight)


def weight_arrangements(value: ir.Value) -> dict[str, Arrangement]:
    """Those of a weight's parameters that stand in another order in it."""
    noted = json.loads(value.metadata_props.get(ARRANGED, "{}"))
    return {name: Arrangement(tuple(shape), tuple(perm)) for name, (shape, perm) in noted.items()}


def _note(value: ir.Value, found: Mapping[str, Arrangement]) -> None:
    if found:
        plain = {name: [a.shape, a.perm] for name, a in found.items()}
        value.metadata_props[ARRANGED] = json.dumps(plain)


def offset_weight(graph: ir.Graph, weight: ir.Value, offset: float) -> ir.Value:
    """A weight without data that is another one plus a constant, in the place of that one."""
    name = f"{weight.name}.plus_{offset:g}"
    made = ir.Value(name=name, shape=weight.shape, type=weight.type)
    made.metadata_props[PARTS] = json.dumps(weight_parts(weight))
    made.metadata_props[OFFSET] = repr(offset)
    _note(made, weight_arrangements(weight))
    del graph.initializers[str(weight.name)]
    graph.initializers[name] = made
    return made


def weight_offset(value: ir.Value) -> float:
    """What is added to the parameters of a weight."""
    return float(value.metadata_props.get(OFFSET, "0"))


def drop_unused_weights(model: ir.Model) -> int:
    """Remove initializers that no node reads (the other phase may read them)."""
    unused = [n for n, v in model.graph.initializers.items() if not v.uses()]
    for name in unused:
        del model.graph.initializers[name]
    return len(unused)


def add_storage_casts(model: ir.Model, dtype: ir.DataType) -> int:
    """Store float32 weights as `dtype` and cast them back where they are read. Tables stay."""
    initializers = model.graph.initializers
    absent = [(name, v) for name, v in initializers.items() if v.const_value is None]
    weights = [(name, v) for name, v in absent if TABLE not in v.metadata_props]
    for name, value in weights:
        stored = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
        stored.metadata_props.update(value.metadata_props)
        # Taken out first: the container follows the names of what it holds.
        del initializers[name]
        value.name = f"{name}.float32"
        cast = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT}, outputs=[value])
        initializers[name] = stored
        model.graph.insert_before(model.graph[0], cast)
    return len(weights)


def add_table(graph: ir.Graph, name: str, numbers: npt.NDArray[np.float32]) -> ir.Value:
    """A weight that the exporter made itself; its numbers stay with it until `take_tables`."""
    table = initializer(graph, name, numbers)
    table.metadata_props[TABLE] = "true"
    return table


def take_tables(model: ir.Model) -> dict[str, npt.NDArray[np.float32]]:
    """The numbers of the tables, which become weights without data like the others."""
    taken = {}
    for name, value in model.graph.initializers.items():
        if TABLE in value.metadata_props and value.const_value is not None:
            taken[name] = value.const_value.numpy()
            value.const_value = None
    return taken
