"""The float graph -> the graph over the operators of `runtime/kernels`. Counted, like every pass.

Both phases are this one graph: the kernels are as fast with one row as with many, so that one
format of the weights, the decode graph's, serves both. What the kernels do not have stays an
operator of ONNX Runtime.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from trtllm_lite.exporter.passes import drop_unused_weights
from trtllm_lite.exporter.passes.edit import only_reader, remove_dead, take_over
from trtllm_lite.exporter.quantize.formats import FORMATS, NONE, Format
from trtllm_lite.exporter.quantize.plan import FormatPlan, Linear
from trtllm_lite.exporter.quantize.rewrite import weights_of
from trtllm_lite.runtime.native_layout import Packing
from trtllm_lite.runtime.native_table import FEW_TOKENS

DOMAIN = "trtllm_lite"
HEAD_STEP = 16
"""Head sizes that the attention kernel takes are multiples of this."""
EXACT_TOKENS = FEW_TOKENS
"""Calls of at most as many tokens a row round activations twice, which is as exact as 16 bits. The
attention kernel has the same bound between its two forms."""
ACTIVATIONS = {"QuickGelu": 1, "Gelu": 2}
# Inputs of GroupQueryAttention that the kernel does not read.
REFUSED_INPUTS = {9: "position_ids", 10: "attention_bias", 14: "q_norm", 15: "k_norm"}
ATTENTION_ATTRIBUTES = {
    "num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "local_window_size",
    "do_rotary",
    "rotary_interleaved",
}


@dataclass(frozen=True)
class NativeGraph:
    """A graph whose initializers have no place yet, how its weights are packed, by the weight's
    name, and how many nodes became what."""

    model: ir.Model
    packings: dict[str, Packing]
    counts: dict[str, int]


@dataclass
class _Lowering:
    graph: ir.Graph
    weights: dict[str, Linear]
    packings: dict[str, Packing] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    gates: dict[ir.Node, "_Gate"] = field(default_factory=dict)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def packed(self, weight: Linear, kind: Format, *, gated: bool = False) -> list[ir.Value]:
        """The initializers of a packed weight, made once."""
        packing = Packing(weight.rows, weight.columns, kind.bits, kind.block, gated)
        self.packings[weight.name] = packing
        values = [
            self._value(f"{weight.name}.codes", packing.codes_shape, ir.DataType.UINT8),
            self._value(f"{weight.name}.scale", packing.scale_shape, ir.DataType.UINT16),
        ]
        if kind.bits == 4:
            zero = self._value(f"{weight.name}.zero", packing.zero_shape, ir.DataType.UINT8)
            values.append(zero)
        return values

    def _value(self, name: str, shape: tuple[int, ...], kind: ir.DataType) -> ir.Value:
        if name not in self.graph.initializers:
            value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
            self.graph.initializers[name] = value
        return self.graph.initializers[name]


def lower_native(
    model: ir.Model, plan: FormatPlan, weights: Iterable[Linear]
) -> NativeGraph | None:
    """A copy of the float graph over our kernels; None when no weight has a format for them."""
    work = model.clone()
    lowering = _Lowering(work.graph, {w.name: w for w in weights}, gates=_gates(work.graph))
    for node in list(work.graph):
        for weight, is_linear in weights_of(node):
            known = lowering.weights[str(weight.name)]
            name = plan.of("decode", known) if is_linear else plan.embedding
            if name != NONE and FORMATS[name].is_block:
                (_linear if is_linear else _gather)(lowering, node, known, FORMATS[name])
    if not lowering.packings:
        return None
    for node in list(work.graph):
        if node.op_type == "GroupQueryAttention" and _attention_fits(node):
            _attention(lowering, node)
    work.graph.opset_imports[DOMAIN] = 1
    work.graph.name = "native"
    drop_unused_weights(work)
    return NativeGraph(work, lowering.packings, lowering.counts)


def round_fast(native: NativeGraph) -> int:
    """Let linear layers round activations once, whatever the tokens, and attention of many tokens
    round what it multiplies to bfloat16. Returns how many linear layers that are."""
    linears = [node for node in native.model.graph if node.op_type == "BlockLinear"]
    for node in linears:
        node.attributes["exact_tokens"] = ir.AttrInt64("exact_tokens", 0)
    for node in native.model.graph:
        if node.op_type.startswith("Attention") and node.domain == DOMAIN:
            node.attributes["bfloat16"] = ir.AttrInt64("bfloat16", 1)
    return len(linears)


def _linear(lowering: _Lowering, node: ir.Node, weight: Linear, kind: Format) -> None:
    gate = lowering.gates.get(node)
    last = gate.product if gate is not None else node
    inputs = [node.inputs[0], *lowering.packed(weight, kind, gated=gate is not None)]
    attributes = _described(weight, kind, ACTIVATIONS[gate.activation.op_type] if gate else 0)
    attributes["exact_tokens"] = EXACT_TOKENS
    new = ir.node("BlockLinear", inputs, attributes, domain=DOMAIN, name=node.name)
    _put(lowering, new, last)
    lowering.count("linear")
    if gate is not None:
        lowering.count("gated")


def _gather(lowering: _Lowering, node: ir.Node, weight: Linear, kind: Format) -> None:
    inputs = [node.inputs[1], *lowering.packed(weight, kind)]
    attributes = _described(weight, kind, 0)
    name = f"{weight.name}.gather"
    _put(lowering, ir.node("BlockGather", inputs, attributes, domain=DOMAIN, name=name), node)
    lowering.count("gather")


def _described(weight: Linear, kind: Format, activation: int) -> dict[str, int]:
    return {
        "n": weight.rows,
        "k": weight.columns,
        "bits": kind.bits,
        "block_size": kind.block,
        "activation": activation,
    }


@dataclass(frozen=True)
class _Gate:
    """activation(first half) * second half of a product."""

    activation: ir.Node
    product: ir.Node


def _gates(graph: ir.Graph) -> dict[ir.Node, _Gate]:
    """The products that are gated. A weight has one packing, so that either all that reads it is
    gated or nothing."""
    readers: dict[ir.Value, dict[ir.Node, _Gate | None]] = {}
    for node in graph:
        for weight, is_linear in weights_of(node):
            gate = _gate(node) if is_linear else None
            readers.setdefault(weight, {})[node] = gate
    return {
        node: gate
        for gates in readers.values()
        if all(gates.values())
        for node, gate in gates.items()
        if gate is not None
    }


def _gate(node: ir.Node) -> _Gate | None:
    split = only_reader(node.outputs[0], "Split")
    if split is None or len(split.outputs) != 2 or not _is_halved(split):
        return None
    gate, up = split.outputs
    activation = only_reader(gate, *ACTIVATIONS)
    if activation is None or not _is_known(activation):
        return None
    product = only_reader(activation.outputs[0], "Mul")
    if product is None or only_reader(up, "Mul") is not product:
        return None
    return _Gate(activation, product)


def _is_halved(split: ir.Node) -> bool:
    shapes = [None if v.shape is None else v.shape[-1] for v in split.outputs]
    last = split.attributes.get_int("axis", 0) in (-1, 2)
    return last and isinstance(shapes[0], int) and shapes[0] == shapes[1]


def _is_known(activation: ir.Node) -> bool:
    if activation.op_type == "QuickGelu":
        return activation.attributes.get_float("alpha", 1.702) == 1.0
    return activation.attributes.get_string("approximate", "none") == "tanh"


def _attention_fits(node: ir.Node) -> bool:
    """Whether the kernel computes what this node does."""
    past = node.inputs[3]
    given = {i for i, v in enumerate(node.inputs) if v is not None}
    if past is None or past.shape is None or given & REFUSED_INPUTS.keys():
        return False
    dim = past.shape[3]
    plain = past.dtype == ir.DataType.FLOAT and set(node.attributes) <= ATTENTION_ATTRIBUTES
    return plain and isinstance(dim, int) and dim % HEAD_STEP == 0


def _attention(lowering: _Lowering, node: ir.Node) -> None:
    given = node.attributes
    attributes = {
        "num_heads": given.get_int("num_heads"),
        "kv_num_heads": given.get_int("kv_num_heads"),
        "scale": given.get_float("scale"),
        "softcap": given.get_float("softcap", 0.0),
        "local_window_size": given.get_int("local_window_size", -1),
        "do_rotary": given.get_int("do_rotary", 0),
        "rotary_interleaved": given.get_int("rotary_interleaved", 0),
        "bfloat16": 0,
    }
    new = ir.node(
        "Attention", node.inputs, attributes, domain=DOMAIN, num_outputs=3, name=node.name
    )
    new.metadata_props.update(node.metadata_props)
    lowering.graph.insert_before(node, new)
    for old, fresh in zip(node.outputs, new.outputs, strict=True):
        take_over(old, fresh)
    lowering.graph.remove(node, safe=True)
    lowering.count("attention")


def _put(lowering: _Lowering, new: ir.Node, old: ir.Node) -> None:
    """`new` takes over the output of `old`; what only fed that one goes."""
    new.metadata_props.update(old.metadata_props)
    lowering.graph.insert_before(old, new)
    take_over(old.outputs[0], new.outputs[0])
    remove_dead([old])
