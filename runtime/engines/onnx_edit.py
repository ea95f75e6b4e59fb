"""Small changes and questions to an ONNX graph on its bytes, for those without the onnx package.

Field numbers are those of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_lite.runtime.protobuf import Field, Reader, WireError

_BYTES = 2
_GRAPH = 7
# message -> field number -> message of the field, from the model down to a dimension.
_TO_DIMENSION: dict[str, dict[int, str]] = {
    "ModelProto": {_GRAPH: "GraphProto"},
    "GraphProto": dict.fromkeys((11, 12, 13), "ValueInfoProto"),
    "ValueInfoProto": {2: "TypeProto"},
    "TypeProto": {1: "Tensor"},
    "Tensor": {2: "TensorShapeProto"},
    "TensorShapeProto": {1: "Dimension"},
}
_DIM_VALUE, _DIM_PARAM = 1, 2
_NODE, _INPUT, _OUTPUT, _NAME, _OP_TYPE, _ATTRIBUTE = 1, 1, 2, 3, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_INT = 1, 3
_LENGTHS_INPUT = 6


@dataclass(frozen=True)
class AttentionNode:
    """An Attention node of ai.onnx. lengths: the name of `nonpad_kv_seqlen`, how many keys of each
    row are valid; None where all of them are. is_causal: whether a query sees no later key."""

    output: str
    lengths: str | None
    is_causal: bool


def with_fixed_dim(data: bytes, name: str, size: int) -> bytes:
    """The ModelProto in `data` with the symbolic dimension `name` fixed to `size`, wherever the
    main graph declares the shape of a value. Raises WireError for malformed bytes, or when no shape
    has such a dimension."""
    made, count = _rewritten(Reader(data), data, "ModelProto", 0, len(data), name, size)
    if not count:
        raise WireError(f"no value of the graph has a dimension {name!r}")
    return made


def attention_nodes(data: bytes) -> tuple[AttentionNode, ...]:
    """The Attention nodes of the main graph, in its order. Raises WireError."""
    reader = Reader(data)
    return tuple(
        _attention(reader, node)
        for graph in children(reader, 0, len(data), _GRAPH)
        for node in children(reader, graph.start, graph.stop, _NODE)
        if text(reader, node, _OP_TYPE) == "Attention"
    )


def _attention(reader: Reader, node: Field) -> AttentionNode:
    inputs = [reader.text(f) for f in children(reader, node.start, node.stop, _INPUT)]
    causal = 0
    for attribute in children(reader, node.start, node.stop, _ATTRIBUTE):
        if text(reader, attribute, _ATTRIBUTE_NAME) == "is_causal":
            values = reader.fields(attribute.start, attribute.stop)
            causal = next((f.value or 0 for f in values if f.number == _ATTRIBUTE_INT), 0)
    lengths = inputs[_LENGTHS_INPUT] if len(inputs) > _LENGTHS_INPUT else ""
    return AttentionNode(text(reader, node, _OUTPUT), lengths or None, causal != 0)


def children(reader: Reader, start: int, stop: int, number: int) -> Iterator[Field]:
    """The messages and texts of that number in data[start:stop]."""
    return (f for f in reader.fields(start, stop) if f.number == number and f.value is None)


def text(reader: Reader, message: Field, number: int) -> str:
    """The first text of that number in a message."""
    found = next(children(reader, message.start, message.stop, number), None)
    return "" if found is None else reader.text(found)


def _rewritten(
    reader: Reader, data: bytes, kind: str, start: int, stop: int, name: str, size: int
) -> tuple[bytes, int]:
    """The message in data[start:stop] with its dimensions fixed, and how many there were."""
    if kind == "Dimension":
        return _dimension(reader, data, start, stop, name, size)
    inner, pieces, count, at = _TO_DIMENSION[kind], [], 0, start
    for field in reader.fields(start, stop):
        if field.number not in inner or field.value is not None:
            continue
        child = inner[field.number]
        body, changed = _rewritten(reader, data, child, field.start, field.stop, name, size)
        if changed:
            pieces += [data[at : before(data, field)], head(field.number, len(body)), body]
            count, at = count + changed, field.stop
    return b"".join([*pieces, data[at:stop]]), count


def _dimension(
    reader: Reader, data: bytes, start: int, stop: int, name: str, size: int
) -> tuple[bytes, int]:
    for field in reader.fields(start, stop):
        if field.number == _DIM_PARAM and field.value is None and reader.text(field) == name:
            return varint(_DIM_VALUE << 3) + varint(size), 1
    return data[start:stop], 0


def head(number: int, length: int) -> bytes:
    """What stands before `length` bytes of the field `number`."""
    return varint(number << 3 | _BYTES) + varint(length)


def before(data: bytes, field: Field) -> int:
    """Where the field begins, what says its number and length included. Raises WireError where
    that is not in its shortest form."""
    expected = head(field.number, field.stop - field.start)
    start = field.start - len(expected)
    if data[start : field.start] != expected:
        raise WireError(f"field {field.number} is not in its shortest form")
    return start


def varint(value: int) -> bytes:
    """A number that is not negative, in its shortest form."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])
