"""The nodes of a graph that the recorded kernel list has no CUDA kernel for, or that would need a
copy between host and device.

The list does not say which inputs a kernel reads in host memory, or which outputs it leaves there;
those of the operators that our graphs have stand here.
Source: ONNX Runtime, the kernels' `InputMemoryType` and `OutputMemoryType`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from trtllm_lite.exporter.cuda_placement.kernel_list import KernelList, Parameter, Schema

HOST_INPUTS: dict[str, tuple[int, ...]] = {
    "CumSum": (1,),
    "Expand": (1,),
    "GroupQueryAttention": (6,),
    "Range": (0, 1, 2),
    "ReduceMax": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}
# Elements of a head are a multiple of this many, and with rotary embedding of twice as many.
# Source: ONNX Runtime, contrib_ops, group_query_attention_helper.h.
HEAD_STEP, PAST_KEY = 8, 3
HOST_OUTPUTS = frozenset({"Shape", "Size"})


@dataclass(frozen=True)
class Misplaced:
    """A node that is not computed on the device, and why."""

    operator: str
    node: str
    why: str

    def __str__(self) -> str:
        return f"{self.operator} ({self.node}): {self.why}"


def misplaced_nodes(model: ir.Model, kernels: KernelList) -> list[Misplaced]:
    """In graph order; empty when every node has a kernel and none needs a copy."""
    types = {str(v.name): _type(v) for v in _given(model.graph) if v.dtype is not None}
    found: list[Misplaced] = []
    for node in model.graph:
        opset = model.graph.opset_imports.get(node.domain, 1)
        schema = kernels.schema(node.domain, node.op_type, opset)
        why = _no_kernel(node, schema, kernels, types) or _copied(node) or _unfit(node)
        if why:
            found.append(Misplaced(node.op_type, str(node.outputs[0].name), why))
    return found


def _given(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()


def _type(value: ir.Value) -> str:
    assert value.dtype is not None
    return f"tensor({value.dtype.name.lower()})"


def _no_kernel(
    node: ir.Node, schema: Schema | None, kernels: KernelList, types: dict[str, str]
) -> str:
    """Why no kernel takes the node, "" when one does. Notes the types of its outputs."""
    if schema is None:
        return "no such operator"
    if len(node.inputs) > schema.max_inputs:
        return f"it takes {schema.max_inputs} inputs, the node has {len(node.inputs)}"
    bound = _bound(node, schema, types)
    unknown = [v.name for v in node.inputs if v is not None and v.name not in types]
    if unknown:
        return f"the type of {unknown[0]!r} is not known"
    candidates = [
        kernel
        for kernel in kernels.kernels.get((node.domain, node.op_type), ())
        if kernel.runs(schema.since)
    ]
    for kernel in candidates:
        if all(bound.get(name, kinds[0]) in kinds for name, kinds in kernel.types.items()):
            return ""
    had = ", ".join(f"{name} = {kind}" for name, kind in sorted(bound.items()))
    return f"no CUDA kernel for {had}" if candidates else "no CUDA kernel"


def _bound(node: ir.Node, schema: Schema, types: dict[str, str]) -> dict[str, str]:
    """The type of each type parameter, by the inputs and by what the graph says of the outputs."""
    bound: dict[str, str] = {}
    for values, parameters in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            parameter = _parameter(parameters, index)
            if value is None or not value.name or parameter is None:
                continue
            known = types.get(value.name) or _declared(value) or bound.get(parameter.type)
            known = known or _given_by(node, parameter)
            if known is not None:
                types[value.name] = known
                bound.setdefault(parameter.type, known)
    return {name: kind for name, kind in bound.items() if not name.startswith("tensor(")}


def _declared(value: ir.Value) -> str | None:
    return None if value.dtype is None else _type(value)


def _given_by(node: ir.Node, parameter: Parameter) -> str | None:
    """The type of an output that an attribute, or the operator alone, decides."""
    if node.op_type == "Cast":
        return f"tensor({ir.DataType(node.attributes.get_int('to')).name.lower()})"
    return parameter.type if parameter.type.startswith("tensor(") else None


def _parameter(parameters: tuple[Parameter, ...], index: int) -> Parameter | None:
    if index < len(parameters):
        return parameters[index]
    return parameters[-1] if parameters and parameters[-1].many else None


def _unfit(node: ir.Node) -> str:
    """Why an attention's kernels refuse its heads when they run, "" when they do not."""
    if node.op_type != "GroupQueryAttention":
        return ""
    step = HEAD_STEP * (2 if node.attributes.get_int("do_rotary", 0) else 1)
    past = node.inputs[PAST_KEY]
    head = past.shape[-1] if past is not None and past.shape is not None else None
    fits = not isinstance(head, int) or head % step == 0
    return "" if fits else f"heads of {head}; its kernels take multiples of {step}"


def _copied(node: ir.Node) -> str:
    """Why a value of the node has to be copied between host and device, "" when none has."""
    if node.op_type in HOST_OUTPUTS:
        return "its result is in host memory"
    for index in HOST_INPUTS.get(node.op_type, ()):
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None and not _is_on_host(value):
            return f"it reads {value.name!r} in host memory"
    return ""


def _is_on_host(value: ir.Value) -> bool:
    """A constant, or a graph input that is read in host memory alone."""
    if value.is_initializer():
        return value.const_value is not None
    return value.is_graph_input() and all(
        use.idx in HOST_INPUTS.get(use.node.op_type, ()) for use in value.uses()
    )
