"""Several ONNX files brought to one file of external data, in which equal bytes stand once.

ONNX Runtime writes an optimised graph's weights, and their packed forms, into one file a graph.
Graphs with the same weights get files that differ in order and offsets only. Here each block goes
into one common file by its content, and the graph's entries are rewritten to the new offsets, so
that the system holds one copy of the pages for all graphs and all processes.

Entries of a tensor: `location`, `offset`, `length` as in onnx.proto, and what ONNX Runtime adds:
`prepacked_<n>` = key|offset;length;checksum[|offset;length;checksum ...], offsets in the same file
(onnxruntime/core/framework/tensor_external_data_info.cc).
"""

import hashlib
import re
from collections.abc import Callable
from typing import BinaryIO

from trtllm_lite.runtime.onnx_wire import CHILDREN
from trtllm_lite.runtime.protobuf import Buffer, Field, Reader, WireError

PAGE = 4096
LINE = 64
"""Offsets of blocks: whole pages for those of a page and more, cache lines for smaller ones."""

Place = Callable[[int, int], int]
"""(offset in the old file, length) -> offset in the new one."""

_EXTERNAL_DATA = 13
_BLOB = re.compile(r"(\d{1,18});(\d{1,18});([^;|]*)")


class SharedData:
    """The common file while it is written: equal blocks get one offset."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = 0
        self._offsets: dict[tuple[int, bytes], int] = {}

    @property
    def size(self) -> int:
        return self._end

    def add(self, block: memoryview) -> int:
        """The offset of these bytes, which are written if they are new. Raises OSError."""
        key = (len(block), hashlib.sha256(block).digest())
        if key not in self._offsets:
            step = PAGE if len(block) >= PAGE else LINE
            start = -(-self._end // step) * step
            self._file.write(bytes(start - self._end))
            self._file.write(block)
            self._offsets[key] = start
            self._end = start + len(block)
        return self._offsets[key]


def moved_into(shared: SharedData, model: Buffer, old: Buffer, location: str) -> bytes:
    """The ModelProto `model`, whose external data are all in `old`, with every block put into
    `shared`, the file beside the model called `location`.

    Raises WireError for bytes that are not what ONNX Runtime writes, OSError when the disk does.
    """
    with memoryview(old) as view:

        def place(offset: int, length: int) -> int:
            if offset + length > len(view):
                raise WireError(f"a block ends at byte {offset + length} of {len(view)}")
            with view[offset : offset + length] as block:
                return shared.add(block)

        return _rebuilt(Reader(model), model, "ModelProto", (0, len(model)), (place, location))


def _rebuilt(
    reader: Reader, data: Buffer, kind: str, span: tuple[int, int], into: tuple[Place, str]
) -> bytes:
    """The message in data[span] with every tensor below it moved."""
    out, at = bytearray(), span[0]
    for field in reader.fields(*span):
        if field.value is not None or field.number not in CHILDREN[kind]:
            continue
        child = CHILDREN[kind][field.number][0]
        inner = (field.start, field.stop)
        if child == "TensorProto":
            new = _tensor(reader, data, inner, into)
        else:
            new = _rebuilt(reader, data, child, inner, into)
        out += data[at : field.start - len(_header(field.number, field.stop - field.start))]
        out += _header(field.number, len(new)) + new
        at = field.stop
    return bytes(out + data[at : span[1]])


def _tensor(reader: Reader, data: Buffer, span: tuple[int, int], into: tuple[Place, str]) -> bytes:
    entries = [
        (field, *_entry(reader, field))
        for field in reader.fields(*span)
        if field.number == _EXTERNAL_DATA and field.value is None
    ]
    if not entries:
        return bytes(data[span[0] : span[1]])
    out, at = bytearray(), span[0]
    moved = _moved({key: value for _, key, value in entries}, *into)
    for field, key, _ in entries:
        new = _text(1, key) + _text(2, moved[key])
        out += data[at : field.start - len(_header(_EXTERNAL_DATA, field.stop - field.start))]
        out += _header(_EXTERNAL_DATA, len(new)) + new
        at = field.stop
    return bytes(out + data[at : span[1]])


def _moved(entries: dict[str, str], place: Place, location: str) -> dict[str, str]:
    """The entries of one tensor in the new file."""
    if not {"location", "offset", "length"} <= entries.keys():
        raise WireError(f"an external tensor has only the keys {sorted(entries)}")
    moved = dict(entries, location=location)
    moved["offset"] = str(place(int(entries["offset"]), int(entries["length"])))
    for key, value in entries.items():
        if key.startswith("prepacked"):
            name, _, blobs = value.partition("|")
            moved[key] = "|".join([name, *(_blob(blob, place) for blob in blobs.split("|"))])
        elif key not in ("location", "offset", "length", "checksum"):
            raise WireError(f"an external tensor has the unknown key {key!r}")
    return moved


def _blob(text: str, place: Place) -> str:
    match = _BLOB.fullmatch(text)
    if match is None:
        raise WireError("a prepacked entry is not offset;length;checksum")
    length = int(match[2])
    return f"{place(int(match[1]), length)};{length};{match[3]}"


def _entry(reader: Reader, entry: Field) -> tuple[str, str]:
    texts = {
        field.number: reader.text(field)
        for field in reader.fields(entry.start, entry.stop)
        if field.value is None
    }
    return texts.get(1, ""), texts.get(2, "")


def _text(number: int, text: str) -> bytes:
    payload = text.encode()
    return _header(number, len(payload)) + payload


def _header(number: int, size: int) -> bytes:
    """Tag and length of a length-delimited field, in the shortest form, which writers use."""
    return _varint(number << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
