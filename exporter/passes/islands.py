"""Values of a float16 graph that stay float32, with casts around the nodes that make and read them.

A product with a weight is not widened, which would double the weight: it is linear in its input, so
it is computed in float16 on the input divided by `REACH` and multiplied afterwards, in float32. A
power of two changes no digit of a float16 value that is not tiny.
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import initializer
from trtllm_lite.runtime.errors import UnsupportedError

HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
REACH = 256.0
"""By how much a product's input is divided."""
# Their kernels, and the cache, are float16.
HALF_ONLY = frozenset({"Attention", "GroupQueryAttention", "TensorScatter"})
# What comes out is what went in.
MOVES = frozenset(
    {"Gather", "GatherND", "GatherElements", "Reshape", "Transpose", "Identity", "Split", "Slice"}
    | {"Concat", "Expand", "Squeeze", "Unsqueeze", "DequantizeLinear", "GatherBlockQuantized"}
)
# Linear in their first input, when these are all they have.
PRODUCTS = {"MatMul": 2, "FusedMatMul": 2, "MatMulNBits": 4}

Step = tuple[str, ir.Value | None, ir.DataType]
"""An operator, the number that it takes beside its input, and the type of what comes out."""


def keep_float32(model: ir.Model, names: Collection[str]) -> int:
    """Let the float16 values of these names be float32; names that the graph lacks do not matter.
    Returns how many nodes that changed.

    Raises UnsupportedError where one is an operand of attention.
    """
    islands = _Islands(model.graph, names)
    return sum(islands.widen(node) for node in list(model.graph))


class _Islands:
    def __init__(self, graph: ir.Graph, names: Collection[str]) -> None:
        self._graph = graph
        self._names = frozenset(names)
        self._wide: set[ir.Value] = set()
        self._cast: dict[ir.Value, ir.Value] = {}
        self._dynamic: set[ir.Value] = set(graph.inputs)

    def widen(self, node: ir.Node) -> bool:
        """Change a node, all before it having been looked at; returns whether it was."""
        given = [value for value in node.inputs if value is not None]
        if any(value in self._dynamic for value in given):
            self._dynamic.update(node.outputs)
        wanted = [v for v in node.outputs if v.name in self._names and v.dtype == HALF]
        if not wanted and not any(value in self._wide for value in given):
            return False
        if node.op_type in HALF_ONLY:
            raise _not_in_attention(node)
        if node.op_type == "Cast":
            return self._recast(node)
        if self._is_product(node):
            self._scale(node)
        elif node.op_type in MOVES and not any(value in self._wide for value in given):
            self._wide.update(self._follow(v, [("Cast", None, FLOAT)]) for v in wanted)
        else:
            self._compute(node)
        return True

    def _is_product(self, node: ir.Node) -> bool:
        """Whether it is linear in its first input, and what it multiplies with is constant."""
        count = sum(value is not None for value in node.inputs)
        weights = node.inputs[1:]
        constant = not any(value in self._dynamic for value in weights if value is not None)
        return constant and count <= PRODUCTS.get(node.op_type, 0)

    def _recast(self, node: ir.Node) -> bool:
        """A cast of a wide value needs no change; one that makes a wide value casts to that."""
        output = node.outputs[0]
        if output.name not in self._names or output.dtype != HALF:
            return False
        node.attributes["to"] = ir.AttrInt64("to", FLOAT)
        output.type = ir.TensorType(FLOAT)
        self._wide.add(output)
        return True

    def _scale(self, node: ir.Node) -> None:
        data, output = node.inputs[0], node.outputs[0]
        assert data is not None
        kind = FLOAT if data in self._wide else HALF
        steps: list[Step] = [("Mul", self._number(1 / REACH, kind), kind)]
        if kind == FLOAT:
            steps.append(("Cast", None, HALF))
        node.replace_input_with(0, self._chain(node, data, steps, before=True))
        back: list[Step] = [("Cast", None, FLOAT), ("Mul", self._number(REACH, FLOAT), FLOAT)]
        if output.name in self._names:
            self._wide.add(self._follow(output, back))
        else:
            self._follow(output, [*back, ("Cast", None, HALF)])

    def _compute(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == HALF:
                node.replace_input_with(index, self._widened(value))
        for value in [v for v in node.outputs if v.dtype == HALF]:
            value.type = ir.TensorType(FLOAT)
            if value.name in self._names:
                self._wide.add(value)
            elif value.uses() or value.is_graph_output():
                self._follow(value, [("Cast", None, HALF)])

    def _widened(self, value: ir.Value) -> ir.Value:
        """A float16 value in float32, cast once, where it is made."""
        if value not in self._cast:
            node = value.producer()
            first = self._graph[0] if node is None else node
            cast = self._chain(first, value, [("Cast", None, FLOAT)], before=node is None)
            self._cast[value] = cast
        return self._cast[value]

    def _follow(self, value: ir.Value, steps: list[Step]) -> ir.Value:
        """Steps after the node that makes a value; what comes out takes its name and readers."""
        node, name = value.producer(), value.name
        assert node is not None
        readers = list(value.uses())
        last = self._chain(node, value, steps, before=False)
        for reader in readers:
            reader.node.replace_input_with(reader.idx, last)
        outputs = self._graph.outputs
        for index, output in enumerate(outputs):
            if output is value:
                outputs[index] = last
        value.name, last.name = f"{name}.narrow", name
        return last

    def _chain(
        self, node: ir.Node, value: ir.Value, steps: list[Step], *, before: bool
    ) -> ir.Value:
        """New nodes, one after the other, before or after a node; each takes the value so far, and
        a number where there is one."""
        made = []
        current = value
        for op_type, number, kind in steps:
            inputs = [current] if number is None else [current, number]
            attributes = {"to": kind} if op_type == "Cast" else {}
            new = ir.node(op_type, inputs, attributes)
            new.metadata_props.update(node.metadata_props)
            new.outputs[0].type, new.outputs[0].shape = ir.TensorType(kind), value.shape
            made.append(new)
            current = new.outputs[0]
        if before:
            self._graph.insert_before(node, made)
        else:
            self._graph.insert_after(node, made)
        if value in self._dynamic:
            self._dynamic.update(new.outputs[0] for new in made)
        return current

    def _number(self, number: float, kind: ir.DataType) -> ir.Value:
        name = f"island.{number:g}.{kind.name.lower()}"
        return initializer(self._graph, name, np.array(number, kind.numpy()))


def _not_in_attention(node: ir.Node) -> UnsupportedError:
    return UnsupportedError(
        f"a wider type than float16 in attention ({node.name or node.op_type})",
        "float16 values there",
        "export with --dtype bfloat16",
    )
