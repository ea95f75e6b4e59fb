"""A float graph -> the same graph over quantized weights. Counted, like every pass."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.external_data import IR_DTYPES, Recipe, Stored
from trtllm_lite.exporter.passes import MICROSOFT, weight_parts
from trtllm_lite.exporter.quantize.formats import FORMATS, NONE, W8A8, Format, Part
from trtllm_lite.exporter.quantize.plan import FormatPlan, Linear
from trtllm_lite.runtime.manifest import Phase

LOGITS, INPUT_IDS = "logits", "input_ids"
# Of MatMulNBits: 4 rounds activations to int8 by the block; 0 and 1 are many times slower.
ACCURACY_LEVEL = 4


def find_linears(models: Iterable[ir.Model]) -> tuple[Linear, ...]:
    """The weights that `quantize_graph` can rewrite, in order of first use, over all graphs."""
    found: dict[str, Linear] = {}
    for model in models:
        head = _head(model.graph)
        for node in model.graph:
            for weight, linear in weights_of(node):
                name = str(weight.name)
                rows, columns = shape_of(weight)
                before = found.get(name)
                found[name] = Linear(
                    name,
                    rows,
                    columns,
                    weight_parts(weight),
                    is_linear=linear or (before is not None and before.is_linear),
                    is_embedding=not linear or (before is not None and before.is_embedding),
                    is_head=weight is head or (before is not None and before.is_head),
                )
    return tuple(found.values())


def quantize_graph(
    model: ir.Model,
    phase: Phase,
    plan: FormatPlan,
    weights: Iterable[Linear],
    dtype: str = "float32",
) -> tuple[dict[str, int], list[Stored]]:
    """Rewrite in place. Returns how many nodes became each format, and what has to be stored.
    dtype: that the graph computes in, which is that of the scales."""
    rewriter = _Rewriter(model.graph, {w.name: w for w in weights}, dtype)
    counts: dict[str, int] = {}
    for node in list(model.graph):
        for weight, linear in weights_of(node):
            known = rewriter.weights[str(weight.name)]
            kind = plan.of(phase, known) if linear else plan.embedding
            if kind != NONE:
                rewriter.replace(node, known, FORMATS[kind], linear=linear)
                label = kind if linear else f"{kind}.embedding"
                counts[label] = counts.get(label, 0) + 1
    return counts, list(rewriter.stored.values())


def shape_of(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None
    return tuple(int(d) for d in value.shape.numpy())


class _Rewriter:
    """Replaces nodes of one graph; keeps what was made, so that it is made once."""

    def __init__(self, graph: ir.Graph, weights: Mapping[str, Linear], dtype: str) -> None:
        self._graph = graph
        self.weights = weights
        self._dtype = dtype
        self.stored: dict[str, Stored] = {}
        self._rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def replace(self, node: ir.Node, weight: Linear, kind: Format, *, linear: bool) -> None:
        if not linear:
            self._gather(node, weight, kind)
        elif kind is W8A8:
            self._per_token(node, weight)
        elif kind.dequantized:
            self._dequantize(node, weight, kind)
        else:
            self._blocks(node, weight, kind)

    def _blocks(self, node: ir.Node, weight: Linear, kind: Format) -> None:
        parts = [p for p in kind.parts if p.same_bytes_as is None]
        attributes = {
            "K": weight.columns,
            "N": weight.rows,
            "bits": kind.bits,
            "block_size": kind.block,
            "accuracy_level": ACCURACY_LEVEL,
        }
        inputs = [node.inputs[0], *(self._part(weight, kind, p) for p in parts)]
        name = _named(node, weight)
        new = ir.node("MatMulNBits", inputs, attributes, domain=MICROSOFT, name=name)
        self._put(node, [new])

    def _dequantize(self, node: ir.Node, weight: Linear, kind: Format) -> None:
        inputs = [self._part(weight, kind, part) for part in kind.parts]
        attributes = {"axis": 0, "block_size": kind.block}
        name = _named(node, weight)
        floats = ir.node("DequantizeLinear", inputs, attributes, name=f"{name}.floats")
        self._name(floats, f"{name}.floats")
        floats.outputs[0].shape = ir.Shape((weight.columns, weight.rows))
        floats.outputs[0].type = inputs[1].type
        product = ir.node("MatMul", [node.inputs[0], floats.outputs[0]], name=name)
        self._put(node, [floats, product])

    def _per_token(self, node: ir.Node, weight: Linear) -> None:
        """Activations are rounded by the token: a row's result depends on that row alone. A row of
        zeros has scale 0: whatever its integers are, the last product is 0."""
        x, name = node.inputs[0], _named(node, weight)
        assert x is not None
        made: list[ir.Node] = []
        if x not in self._rounded:
            self._rounded[x] = self._round_tokens(x, name, made)
        rounded, amax = self._rounded[x]
        w8, scale = (self._part(weight, W8A8, p) for p in W8A8.parts)
        step, middle = self._constants()
        product = ir.node(
            "MatMulIntegerToFloat",
            [rounded, w8, step, scale, middle],
            domain=MICROSOFT,
            name=name,
        )
        last = ir.node("Mul", [product.outputs[0], amax], name=f"{name}.scaled")
        self._name(product, f"{name}.unit")
        self._put(node, [*made, product, last])

    def _round_tokens(
        self, x: ir.Value, name: str, made: list[ir.Node]
    ) -> tuple[ir.Value, ir.Value]:
        """[.., K] float32 -> uint8 about 128 in units of amax / 127, and amax [.., 1]."""
        axes = self._constant("w8a8.axes", np.array([-1], np.int64))
        step, middle = self._constants()
        absolute = ir.node("Abs", [x], name=f"{name}.abs")
        amax = ir.node(
            "ReduceMax", [absolute.outputs[0], axes], {"keepdims": 1}, name=f"{name}.max"
        )
        unit = ir.node("Div", [x, amax.outputs[0]], name=f"{name}.div")
        q = ir.node("QuantizeLinear", [unit.outputs[0], step, middle], name=f"{name}.quantize")
        for node in (absolute, amax, unit, q):
            self._name(node, str(node.name))
            made.append(node)
        return q.outputs[0], amax.outputs[0]

    def _gather(self, node: ir.Node, weight: Linear, kind: Format) -> None:
        rows, scale = (self._part(weight, kind, p) for p in (kind.parts[2], kind.parts[1]))
        attributes = {
            "bits": kind.bits,
            "block_size": kind.block,
            "gather_axis": 0,
            "quantize_axis": 1,
        }
        name = f"{weight.name}.gather"
        inputs = [rows, node.inputs[1], scale]
        new = ir.node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT, name=name)
        made = [new]
        if weight.columns % kind.block:
            self._name(new, f"{name}.padded")
            bounds = [
                self._constant(f"{name}.{n}", np.array([v], np.int64))
                for n, v in (("start", 0), ("stop", weight.columns), ("axis", -1))
            ]
            made.append(ir.node("Slice", [new.outputs[0], *bounds], name=f"{name}.cut"))
        self._put(node, made)

    def _constants(self) -> tuple[ir.Value, ir.Value]:
        step = self._constant("w8a8.step", np.array(1 / 127, np.float32))
        return step, self._constant("w8a8.middle", np.array(128, np.uint8))

    def _constant(self, name: str, array: Any) -> ir.Value:
        initializers = self._graph.initializers
        if name not in initializers:
            tensor = ir.tensor(array, name=name)
            initializers[name] = ir.Value(
                name=name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
        return initializers[name]

    def _part(self, weight: Linear, kind: Format, part: Part) -> ir.Value:
        """The initializer of a part of a weight, noted as to be stored."""
        name = f"{weight.name}.{part.suffix}"
        initializers = self._graph.initializers
        if name not in initializers:
            shape = part.shape(weight.rows, weight.columns)
            self._store(weight, kind)
            initializers[name] = ir.Value(
                name=name, shape=ir.Shape(shape), type=ir.TensorType(IR_DTYPES[self._type(part)])
            )
        return initializers[name]

    def _store(self, weight: Linear, kind: Format) -> None:
        size = (weight.rows, weight.columns)
        recipe = Recipe(weight.name, weight.parts, size, kind.name, self._dtype)
        for part in kind.parts:
            name, other = f"{weight.name}.{part.suffix}", part.same_bytes_as
            self.stored[name] = Stored(
                name,
                self._type(part),
                part.shape(weight.rows, weight.columns),
                recipe,
                part.suffix,
                None if other is None else f"{weight.name}.{other}",
            )

    def _type(self, part: Part) -> str:
        return self._dtype if part.dtype == "float32" else part.dtype

    def _name(self, node: ir.Node, name: str) -> None:
        node.outputs[0].name = name

    def _put(self, node: ir.Node, made: list[ir.Node]) -> None:
        """The last of `made` takes over the old node's output."""
        output, fresh = node.outputs[0], made[-1].outputs[0]
        for new in made:
            new.metadata_props.update(node.metadata_props)
        fresh.name, fresh.shape, fresh.type = output.name, output.shape, output.type
        ir.convenience.replace_nodes_and_values(self._graph, node, [node], made, [output], [fresh])


def weights_of(node: ir.Node) -> Iterator[tuple[ir.Value, bool]]:
    """The weight that a node multiplies by (True) or looks tokens up in (False)."""
    if node.op_type == "FusedMatMul" and _plain_product(node):
        weight = node.inputs[1]
        if weight is not None and _is_weight(weight):
            yield weight, True
    elif node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        weight, indices = node.inputs
        if weight is not None and _is_weight(weight) and _is_tokens(indices):
            yield weight, False


def _named(node: ir.Node, weight: Linear) -> str:
    return node.name or weight.name


def _plain_product(node: ir.Node) -> bool:
    """x W^T and nothing else."""
    a = node.attributes
    flags = [a.get_int(n, 0) for n in ("transA", "transBatchA", "transBatchB")]
    return a.get_int("transB", 0) == 1 and not any(flags) and a.get_float("alpha", 1.0) == 1.0


def _is_tokens(value: ir.Value | None) -> bool:
    return value is not None and value.is_graph_input() and value.name == INPUT_IDS


def _is_weight(value: ir.Value) -> bool:
    return (
        value.is_initializer()
        and value.const_value is None
        and value.shape is not None
        and len(value.shape) == 2
    )


def _head(graph: ir.Graph) -> ir.Value | None:
    """The weight of the product that is nearest before the logits."""
    logits = next(v for v in graph.outputs if v.name == LOGITS)
    waiting, seen = [logits], set[ir.Value]()
    while waiting:
        value = waiting.pop(0)
        node = value.producer()
        if node is None or value in seen:
            continue
        seen.add(value)
        for weight, linear in weights_of(node):
            if linear:
                return weight
        waiting += [v for v in node.inputs if v is not None]
    return None
