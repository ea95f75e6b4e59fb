"""Weights of a graph as its inputs: what lets several plans read one copy of them.

A plan holds the weights that are constants of its graph. Those that are inputs stay where whoever
runs the plan has put them, so all plans of a bundle can be given the same addresses. Matrices
become inputs; what has one dimension (norms, biases) is small and stays a constant. A matrix that
several nodes read, such as an embedding that is the head too, is an input for each of them, all
with one address: TensorRT-RTX copies an input that is wanted in two layouts in every run.
Field numbers are those of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from trtllm_lite.runtime.engines.onnx_edit import before, children, head, text, varint
from trtllm_lite.runtime.engines.record import SharedWeight
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.onnx_wire import ExternalData, external_data
from trtllm_lite.runtime.protobuf import Field, Reader, WireError

ELEMENTS = {1: "float32", 3: "int8", 10: "float16", 16: "bfloat16", 17: "float8e4m3fn"}
"""TensorProto.DataType of what can be shared."""
FP8, INT4 = 17, 22
OLDEST_GPU = {FP8: ("fp8", 89), INT4: ("int4", 80)}
"""Compute capability that weights of a type need (NVIDIA TensorRT, support matrix)."""
NOT_INT4 = (
    "--share-weights: this bundle has int4 weights, which TensorRT keeps packed and multiplies as "
    "they are only where a plan holds them; as inputs they would be unpacked to 16 bits in every "
    "step; use --single-engine, or leave it out"
)
_GRAPH, _NODE, _INITIALIZER, _INPUT, _NAME, _READ = 7, 1, 5, 11, 8, 1


def shared_weights(graphs: Iterable[bytes]) -> tuple[SharedWeight, ...]:
    """The weights with two dimensions or more of all these ModelProtos, those that stand in another
    file, by their place in it. Raises UsageError for weights that lose too much as inputs,
    WireError for malformed bytes and for graphs that mean different weights by one name."""
    found: dict[str, SharedWeight] = {}
    for data in graphs:
        readers = _readers(data)
        for tensor in external_data(data):
            for i in range(max(1, readers[tensor.name]) if len(tensor.dims) > 1 else 0):
                made = _shared(tensor, i)
                if found.setdefault(made.name, made) != made:
                    raise WireError(f"the graphs mean different weights by {tensor.tensor}")
    return tuple(sorted(found.values(), key=lambda w: w.offset))


def check_gpus(graph: bytes, gpus: Iterable[str]) -> None:
    """Raise UsageError for GPUs, named as "sm89", that have no arithmetic for the weights of this
    ModelProto."""
    kinds = {tensor.data_type for tensor in external_data(graph)}
    for name, least in (found for kind, found in OLDEST_GPU.items() if kind in kinds):
        older = [gpu for gpu in gpus if int(gpu.removeprefix("sm")) < least]
        if older:
            raise UsageError(
                f"--gpu {','.join(older)}: this bundle has {name} weights, which need sm{least} or "
                "newer; leave it out, or export with --quantize int8"
            )


def input_name(weight: str, reader: int) -> str:
    """The input for the nodes that read a weight: their number, from 0 on, in the graph's order."""
    return f"{weight}@{reader}" if reader else weight


def _readers(data: bytes) -> Counter[str]:
    """How many nodes of the main graph read each value."""
    reader, found = Reader(data), Counter[str]()
    for graph in children(reader, 0, len(data), _GRAPH):
        for node in children(reader, graph.start, graph.stop, _NODE):
            read = children(reader, node.start, node.stop, _READ)
            found.update({reader.text(field) for field in read})
    return found


def _shared(tensor: ExternalData, reader: int) -> SharedWeight:
    if tensor.data_type == INT4:
        raise UsageError(NOT_INT4)
    if tensor.data_type not in ELEMENTS:
        kind = f"elements of ONNX type {tensor.data_type}"
        raise UsageError(f"--share-weights: {tensor.tensor} has {kind}; leave it out")
    dtype = ELEMENTS[tensor.data_type]
    name = input_name(tensor.name, reader)
    return SharedWeight(name, dtype, tensor.dims, tensor.offset, tensor.length)


def with_weights_as_inputs(data: bytes, weights: Iterable[SharedWeight]) -> bytes:
    """The ModelProto in `data` with those initializers of its main graph as inputs, behind the
    others, that have the name of one of `weights`. Raises WireError for malformed bytes."""
    wanted = {w.name: w for w in weights}
    reader = Reader(data)
    (graph,) = children(reader, 0, len(data), _GRAPH)
    body = _edited(reader, data, graph, wanted)
    start = before(data, graph)
    return b"".join([data[:start], head(_GRAPH, len(body)), body, data[graph.stop :]])


def _edited(reader: Reader, data: bytes, graph: Field, wanted: dict[str, SharedWeight]) -> bytes:
    """The graph's bytes: initializers that are wanted left out, and declared as inputs."""
    readers = Counter[str]()
    found: list[SharedWeight] = []
    kept, at = [], graph.start
    for field in reader.fields(graph.start, graph.stop):
        made: bytes | None = None
        if field.number == _NODE and field.value is None:
            made = _renamed(reader, data, field, wanted, readers)
        elif field.number == _INITIALIZER and text(reader, field, _NAME) in wanted:
            found.append(wanted[text(reader, field, _NAME)])
            made = b""
        if made is not None:
            kept += [data[at : before(data, field)], made]
            at = field.stop
    inputs = [
        _message(_INPUT, _value(replace(weight, name=input_name(weight.name, i))))
        for weight in found
        for i in range(max(1, readers[weight.name]))
    ]
    return b"".join([*kept, data[at : graph.stop], *inputs])


def _renamed(
    reader: Reader,
    data: bytes,
    node: Field,
    wanted: dict[str, SharedWeight],
    readers: Counter[str],
) -> bytes | None:
    """The node as a field of the graph, reading inputs of its own; None where it stays as it is.
    `readers`: of each weight, the nodes so far; counts this one."""
    kept, at = [], node.start
    places = [(f, reader.text(f)) for f in children(reader, node.start, node.stop, _READ)]
    for field, name in places:
        if name in wanted and readers[name]:
            new = input_name(name, readers[name]).encode()
            kept += [data[at : before(data, field)], _message(_READ, new)]
            at = field.stop
    readers.update({name for _, name in places})
    return _message(_NODE, b"".join([*kept, data[at : node.stop]])) if kept else None


def _value(weight: SharedWeight) -> bytes:
    """A ValueInfoProto: name, and type with element type and shape."""
    dims = b"".join(_message(1, varint(1 << 3) + varint(size)) for size in weight.shape)
    numbers = {name: number for number, name in ELEMENTS.items()}
    tensor = varint(1 << 3) + varint(numbers[weight.dtype]) + _message(2, dims)
    return _message(1, weight.name.encode()) + _message(2, _message(1, tensor))


def _message(number: int, body: bytes) -> bytes:
    return head(number, len(body)) + body
