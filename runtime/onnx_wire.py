"""What the tensors of an ONNX file name as external data, read from the protobuf bytes.

A graph decides which file, which offset and how many bytes are mapped into memory as weights, so
this is read and checked before anything else opens the graph. Only the messages on the way from
ModelProto to TensorProto are entered (main graph, subgraphs in attributes, sparse tensors,
functions, training graphs); all else, raw tensor data above all, is jumped over. The field numbers
are those of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).

A singular message given twice is refused: protobuf merges the two, no writer produces it, and what
is checked here would not be what is used.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_lite.runtime.protobuf import Buffer, Field, Reader, WireError
from trtllm_lite.runtime.strict_json import shown

MAX_DEPTH = 100
MAX_BYTES = 2**53
_NUMBER = re.compile(r"[0-9]{1,16}")
_ALLOWED_KEYS = ("location", "offset", "length", "checksum")
_EXTERNAL = 1

# message -> field number -> (message of the field, whether it may be given once only)
CHILDREN: dict[str, dict[int, tuple[str, bool]]] = {
    "ModelProto": {
        7: ("GraphProto", True),
        20: ("TrainingInfoProto", False),
        25: ("FunctionProto", False),
    },
    "TrainingInfoProto": {1: ("GraphProto", True), 2: ("GraphProto", True)},
    "FunctionProto": {7: ("NodeProto", False), 11: ("AttributeProto", False)},
    "GraphProto": {
        1: ("NodeProto", False),
        5: ("TensorProto", False),
        15: ("SparseTensorProto", False),
    },
    "NodeProto": {5: ("AttributeProto", False)},
    "AttributeProto": {
        5: ("TensorProto", True),
        6: ("GraphProto", True),
        10: ("TensorProto", False),
        11: ("GraphProto", False),
        22: ("SparseTensorProto", True),
        23: ("SparseTensorProto", False),
    },
    "SparseTensorProto": {1: ("TensorProto", True), 2: ("TensorProto", True)},
}
_GRAPH, _NODE, _OP_TYPE = 7, 1, 4
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 13, 14

# TensorProto.DataType -> bits of an element; strings have no external form.
ELEMENT_BITS = {
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((7, 11, 13, 14), 64),
    15: 128,
    **dict.fromkeys((21, 22, 23), 4),
    **dict.fromkeys((27, 28), 6),
    **dict.fromkeys((25, 26), 2),
}


@dataclass(frozen=True)
class ExternalData:
    """One tensor kept outside the graph file: `length` bytes of `location` from `offset` on.
    data_type: a TensorProto.DataType."""

    name: str
    location: str
    offset: int
    length: int
    dims: tuple[int, ...]
    data_type: int

    @property
    def tensor(self) -> str:
        """The name as it may be shown."""
        return shown(self.name)


def external_data(data: Buffer) -> Iterator[ExternalData]:
    """Every external tensor of the ModelProto in `data`, wherever it hides.

    Raises WireError for malformed bytes, for an entry with unknown or repeated keys, a missing
    location, numbers that are not plain digits, or a length that is not the tensor's size.
    """
    yield from _walk(Reader(data), "ModelProto", 0, len(data), 0)


def operators(data: Buffer) -> frozenset[str]:
    """The operators of the main graph's nodes, without their domains. Raises WireError."""
    reader = Reader(data)
    graphs = [f for f in reader.fields(0, len(data)) if f.number == _GRAPH and f.value is None]
    nodes = [f for g in graphs for f in reader.fields(g.start, g.stop) if f.number == _NODE]
    parts = (f for node in nodes for f in reader.fields(node.start, node.stop))
    return frozenset(reader.text(f) for f in parts if f.number == _OP_TYPE and f.value is None)


def _walk(reader: Reader, kind: str, start: int, stop: int, depth: int) -> Iterator[ExternalData]:
    if depth > MAX_DEPTH:
        raise WireError(f"messages are nested deeper than {MAX_DEPTH}")
    table, seen = CHILDREN[kind], set[int]()
    for field in reader.fields(start, stop):
        if field.number not in table or field.value is not None:
            continue
        child, once = table[field.number]
        if once and field.number in seen:
            raise WireError(f"field {field.number} of {kind} is given twice")
        seen.add(field.number)
        if child == "TensorProto":
            yield from _tensor(reader, field)
        else:
            yield from _walk(reader, child, field.start, field.stop, depth + 1)


def _tensor(reader: Reader, tensor: Field) -> Iterator[ExternalData]:
    name, data_type, location = "", 0, 0
    dims: list[int] = []
    entries: dict[str, str] = {}
    for field in reader.fields(tensor.start, tensor.stop):
        if field.number == _DIMS:
            dims.extend(reader.numbers(field))
        elif field.number == _DATA_TYPE and field.value is not None:
            data_type = field.value & 0xFFFFFFFF
        elif field.number == _DATA_LOCATION and field.value is not None:
            location = field.value & 0xFFFFFFFF
        elif field.number == _NAME and field.value is None:
            name = reader.text(field)
        elif field.number == _EXTERNAL_DATA and field.value is None:
            key, value = _entry(reader, field)
            if key in entries or key not in _ALLOWED_KEYS:
                why = "twice" if key in entries else "which is unknown"
                raise WireError(f"tensor {shown(name)} has external data key {shown(key)} {why}")
            entries[key] = value
    if entries or location == _EXTERNAL:
        offset, length = _checked(shown(name), entries, _size(shown(name), dims, data_type))
        place = entries["location"]
        yield ExternalData(name, place, offset, length, tuple(dims), data_type)


def _entry(reader: Reader, entry: Field) -> tuple[str, str]:
    """Key and value of a StringStringEntryProto."""
    texts: dict[int, str] = {}
    for field in reader.fields(entry.start, entry.stop):
        if field.value is None and field.number in (1, 2):
            if field.number in texts:
                raise WireError("an external data entry has two keys or two values")
            texts[field.number] = reader.text(field)
    return texts.get(1, ""), texts.get(2, "")


def _size(name: str, dims: list[int], data_type: int) -> int:
    if data_type not in ELEMENT_BITS:
        raise WireError(f"tensor {name} has element type {data_type}, which has no external form")
    bits = ELEMENT_BITS[data_type]
    for dim in dims:
        if dim > MAX_BYTES:
            raise WireError(f"tensor {name} has a negative or absurd dimension")
        # A zero dimension makes the tensor empty whatever the others say.
        bits = min(bits * dim, 8 * MAX_BYTES + 8)
    size = (bits + 7) // 8
    if size > MAX_BYTES:
        raise WireError(f"tensor {name} is larger than any file")
    return size


def _checked(name: str, entries: dict[str, str], size: int) -> tuple[int, int]:
    """Offset and length."""
    if "location" not in entries:
        raise WireError(f"tensor {name} is external but names no location")
    numbers = {"offset": 0, "length": size}
    for key in numbers:
        if key in entries:
            if not _NUMBER.fullmatch(entries[key]):
                text = f"tensor {name} has {key} {shown(entries[key])}"
                raise WireError(f"{text}; allowed: 0 to 2**53 in plain digits")
            numbers[key] = int(entries[key])
    if numbers["length"] != size:
        text = f"tensor {name} has length {numbers['length']}, its shape and type need {size}"
        raise WireError(text)
    return numbers["offset"], size
