"""Rules about which operators there are at all."""

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims

OPSET = 24
# What TensorRT parses without a plugin, of what graphs of decoders are made of.
OPERATORS = frozenset(
    {
        *(
            "Add",
            "And",
            "Attention",
            "Cast",
            "Clip",
            "Concat",
            "CumSum",
            "DequantizeLinear",
            "Div",
            "Equal",
        ),
        *(
            "Erf",
            "Exp",
            "Expand",
            "Gather",
            "GatherElements",
            "GatherND",
            "Gelu",
            "Gemm",
            "Greater",
        ),
        *("GreaterOrEqual", "Identity", "LayerNormalization", "Less", "LessOrEqual", "Log"),
        *("MatMul", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "RMSNormalization", "Range"),
        *("Reciprocal", "ReduceMax", "ReduceMean", "ReduceSum", "Relu", "Reshape"),
        *("RotaryEmbedding", "Shape", "Sigmoid", "Slice", "Softmax", "Softplus", "Split", "Sqrt"),
        *("Squeeze", "Sub", "Swish", "Tanh", "TensorScatter", "Transpose", "Unsqueeze", "Where"),
    }
)
# Matched by its name in any domain, with another order of inputs in each version.
PLUGIN_PREFIX = "TRT_"


def _opset(model: ir.Model) -> Iterator[str]:
    found = model.graph.opset_imports.get("")
    if found != OPSET:
        yield f"ai.onnx {found}; it must be {OPSET}, which TensorScatter and Attention need"


def _domains(model: ir.Model) -> Iterator[str]:
    for node in model.graph:
        if node.domain:
            yield f"{node.domain}.{node.op_type}; only ai.onnx has operators that need no plugin"


def _functions(model: ir.Model) -> Iterator[str]:
    for key in model.functions:
        yield f"{'.'.join(part for part in key if part)}, a function of the model"


def _plugins(model: ir.Model) -> Iterator[str]:
    for node in model.graph:
        if node.op_type.startswith(PLUGIN_PREFIX):
            yield f"{node.op_type}, whose inputs differ between versions"


def _operators(model: ir.Model) -> Iterator[str]:
    for node in model.graph:
        known = node.op_type in OPERATORS or node.op_type.startswith(PLUGIN_PREFIX)
        if not node.domain and not known:
            yield f"{node.op_type}, which is not known to be parsed"


def _rotary(model: ir.Model) -> Iterator[str]:
    for node in model.graph:
        heads, size = node.attributes.get_int("num_heads", 0), dims(node.inputs[0])
        if node.op_type == "RotaryEmbedding" and (size is None or len(size) != 4) and not heads:
            yield f"{node.name} over {size} without its number of heads"


def _inputs(model: ir.Model) -> Iterator[str]:
    """Engines have no tensor for an input that nothing reads, so that binding it fails."""
    for value in model.graph.inputs:
        if not value.uses():
            yield f"the input {value.name}, which nothing reads"


def _logits(model: ir.Model) -> Iterator[str]:
    for value in model.graph.outputs:
        if value.name == "logits" and value.dtype != ir.DataType.FLOAT:
            yield f"logits of type {value.dtype}; they are float32 whatever the rest is"


OPERATOR_RULES: Mapping[str, Callable[[ir.Model], Iterator[str]]] = {
    "opset": _opset,
    "domain": _domains,
    "function": _functions,
    "plugin": _plugins,
    "operator": _operators,
    "rotary_heads": _rotary,
    "unused_input": _inputs,
    "logits": _logits,
}
