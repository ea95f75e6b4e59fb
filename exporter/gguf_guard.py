"""The head of a GGUF file, read without trusting it.

Format: magic, version, counts, key-value pairs, tensor infos, then aligned tensor data.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.exporter.guarded_file import mapped
from trtllm_lite.runtime.errors import CheckpointError
from trtllm_lite.runtime.strict_json import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 2**16
MAX_TENSORS = 2**20
MAX_ARRAY_TEXTS = 2**22
MAX_KEY_BYTES = 2**16 - 1
MAX_NAME_BYTES = 1024
MAX_TEXT_BYTES = 16 * 2**20
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
HEAD_BYTES = 24
# Smallest key-value pair: key length, type, one byte. Smallest tensor info: name length, number
# of dimensions, type, offset.
MIN_PAIR_BYTES, MIN_INFO_BYTES = 13, 24

# value type -> struct code of one element
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9

# tensor type -> (elements of a block, bytes of a block); ggml's table.
BLOCKS = {
    **{0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)},
    **{9: (32, 40), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176)},
    **{14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98)},
    **{19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136)},
    **{24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2)},
    **{34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18)},
}

Value = int | float | bool | str


@dataclass(frozen=True)
class GGUFEntry:
    """One tensor. `shape` is in GGUF's order, fastest dimension first; its bytes are
    start .. stop, counted from the header's `data_start`."""

    name: str
    type: int
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a file holds. `metadata` has the scalar and string values; of arrays only the number
    of elements is kept, in `array_lengths`."""

    version: int
    metadata: dict[str, Value]
    array_lengths: dict[str, int]
    tensors: tuple[GGUFEntry, ...]
    data_start: int


def check_gguf(path: Path) -> GGUFHeader:
    """The checked head; tensor data is not read.

    Raises CheckpointError for a wrong magic or version, counts and lengths that the file is too
    short for, unknown types, repeated names, and tensors that overlap or leave the file.
    """
    with mapped(path, HEAD_BYTES) as data:
        reader = _Reader(path.name, data)
        if data[:4] != MAGIC:
            raise CheckpointError(f"{path.name}: not a GGUF file")
        version = _version(path, data)
        tensors = reader.count(8, MAX_TENSORS, "tensors")
        pairs = reader.count(16, MAX_KEYS, "keys")
        reader.need(tensors * MIN_INFO_BYTES + pairs * MIN_PAIR_BYTES)
        metadata, lengths = _pairs(reader, pairs)
        infos = [_info(reader) for _ in range(tensors)]
        alignment = _alignment(path, metadata)
        data_start = -(-reader.at // alignment) * alignment
        _check_tensors(path, infos, alignment, max(0, len(data) - data_start))
        return GGUFHeader(version, metadata, lengths, tuple(infos), data_start)


def _version(path: Path, data: mmap.mmap) -> int:
    version = int.from_bytes(data[4:8], "little")
    if version not in VERSIONS:
        big = int.from_bytes(data[4:8], "big") in VERSIONS
        said = "is big-endian" if big else f"has GGUF version {version}"
        raise CheckpointError(f"{path.name}: {said}; read are little-endian versions 2 and 3")
    return version


def _pairs(reader: "_Reader", count: int) -> tuple[dict[str, Value], dict[str, int]]:
    metadata: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(count):
        key = reader.text("a key", MAX_KEY_BYTES)
        if key in metadata or key in lengths:
            raise reader.error(f"key {shown(key)} is there twice")
        kind = reader.unpack("I")
        if kind == ARRAY:
            lengths[key] = _skip_array(reader, key)
        elif kind == STRING:
            metadata[key] = reader.text(f"key {shown(key)}", MAX_TEXT_BYTES)
        elif kind in SCALARS:
            metadata[key] = reader.unpack(SCALARS[kind])
        else:
            raise reader.error(f"key {shown(key)} has the unknown type {kind}")
    return metadata, lengths


def _skip_array(reader: "_Reader", key: str) -> int:
    kind, count = reader.unpack("I"), reader.unpack("Q")
    if kind in SCALARS:
        reader.skip(count * struct.calcsize(SCALARS[kind]))
    elif kind == STRING:
        if count > MAX_ARRAY_TEXTS:
            text = f"key {shown(key)} claims {count} strings; at most {MAX_ARRAY_TEXTS} are read"
            raise reader.error(text)
        reader.need(8 * count)
        for _ in range(count):
            reader.skip(reader.unpack("Q"))
    else:
        raise reader.error(f"key {shown(key)} is an array of the unknown type {kind}")
    return int(count)


def _info(reader: "_Reader") -> GGUFEntry:
    name = reader.text("a tensor name", MAX_NAME_BYTES)
    dims = reader.unpack("I")
    if dims > MAX_DIMS:
        raise reader.error(f"tensor {shown(name)} claims {dims} dimensions; at most {MAX_DIMS}")
    shape = tuple(reader.unpack("Q") for _ in range(dims))
    kind, start = reader.unpack("I"), reader.unpack("Q")
    if kind not in BLOCKS:
        raise reader.error(f"tensor {shown(name)} has the unknown type {kind}")
    elements, size = BLOCKS[kind]
    if shape and shape[0] % elements:
        text = f"rows of {shape[0]}, not a multiple of its block of {elements}"
        raise reader.error(f"tensor {shown(name)} has {text}")
    blocks = 1
    for dim in shape:
        blocks *= dim
    return GGUFEntry(name, kind, shape, start, start + blocks // elements * size)


def _alignment(path: Path, metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= 2**20 or value & (value - 1):
        text = f"general.alignment is {shown(value)}; allowed: a power of two from 8 to 2**20"
        raise CheckpointError(f"{path.name}: {text}")
    return value


def _check_tensors(path: Path, infos: list[GGUFEntry], alignment: int, size: int) -> None:
    names: set[str] = set()
    end = 0
    for info in sorted(infos, key=lambda info: (info.start, info.stop)):
        title = f"{path.name}: tensor {shown(info.name)}"
        if info.name in names:
            raise CheckpointError(f"{title} is there twice")
        names.add(info.name)
        if info.start % alignment:
            raise CheckpointError(f"{title} starts at {info.start}, not a multiple of {alignment}")
        if info.start < end:
            raise CheckpointError(f"{title} overlaps the one before it")
        if info.stop > size:
            text = f"ends at byte {info.stop} of the data, which has {size}; download it again"
            raise CheckpointError(f"{title} {text}")
        end = info.stop


class _Reader:
    """Reads little-endian values in order; `at` is the position."""

    def __init__(self, name: str, data: mmap.mmap) -> None:
        self._name = name
        self._data = data
        self.at = HEAD_BYTES

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._name}: {text}")

    def count(self, at: int, limit: int, what: str) -> int:
        value = int.from_bytes(self._data[at : at + 8], "little")
        if value > limit:
            raise self.error(f"claims {value} {what}; at most {limit} are read")
        return value

    def need(self, size: int) -> None:
        left = len(self._data) - self.at
        if size > left:
            raise self.error(f"truncated: {size} more bytes are needed, {left} are left")

    def skip(self, size: int) -> None:
        self.need(size)
        self.at += size

    def unpack(self, code: str) -> int:
        at = self.at
        self.skip(struct.calcsize(code))
        value: int = struct.unpack_from(f"<{code}", self._data, at)[0]
        return value

    def text(self, what: str, limit: int) -> str:
        size = self.unpack("Q")
        if size > limit:
            raise self.error(f"{what} claims {size} bytes; at most {limit} are read")
        at = self.at
        self.skip(size)
        try:
            return self._data[at : at + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None
