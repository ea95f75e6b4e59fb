"""The header of a safetensors file, read without trusting it.

Format: 8 bytes little-endian length N, N bytes of JSON, then the data; every byte of the data
belongs to exactly one tensor. https://github.com/huggingface/safetensors#format
"""

import os
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.exporter.guarded_file import guarded
from trtllm_lite.runtime import strict_json
from trtllm_lite.runtime.errors import CheckpointError
from trtllm_lite.runtime.strict_json import shown

MAX_HEADER_BYTES = 32 * 2**20
MAX_DIMS = 16
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor: its bytes are start .. stop, counted from the header's `data_start`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file holds, in the order of the bytes. `data_start` is the offset of the data."""

    tensors: tuple[SafetensorsEntry, ...]
    metadata: dict[str, str]
    data_start: int


def check_safetensors(path: Path) -> SafetensorsHeader:
    """The checked header; the data is not read.

    Raises CheckpointError for a header past the end of the file or over 32 MB, JSON that is not
    strict, an unknown dtype, and tensors that overlap, leave a gap, leave the file, or have other
    bytes than dtype and shape need.
    """
    with guarded(path) as (fd, size):
        raw, data_start = _read_header(path, fd, size)
    try:
        document = strict_json.parse(raw)
    except ValueError as error:
        raise CheckpointError(f"{path.name}: the header is {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path.name}: the header must be a JSON object")
    metadata = _metadata(path, document.pop("__metadata__", {}))
    entries = [_entry(path, name, value) for name, value in document.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_cover(path, entries, size - data_start)
    return SafetensorsHeader(tuple(entries), metadata, data_start)


def _read_header(path: Path, fd: int, size: int) -> tuple[bytes, int]:
    prefix = os.pread(fd, 9, 0)
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 9 or length > size - 8:
        text = f"its header claims {length} bytes, the file has {size}; download it again"
        raise CheckpointError(f"{path.name}: truncated or not safetensors: {text}")
    if length > MAX_HEADER_BYTES:
        text = f"its header claims {length} bytes; at most {MAX_HEADER_BYTES} are read"
        raise CheckpointError(f"{path.name}: {text}")
    if prefix[8:] != b"{":
        raise CheckpointError(f"{path.name}: not a safetensors file: the header is no JSON object")
    return os.pread(fd, length, 8), 8 + length


def _metadata(path: Path, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(f"{path.name}: __metadata__ must be an object of strings")
    return value


def _entry(path: Path, name: str, value: object) -> SafetensorsEntry:
    title = f"{path.name}: tensor {shown(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{title} must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{title} has the unknown dtype {shown(dtype)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{title} has the impossible shape {shown(shape)}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{title} has the impossible data_offsets {shown(offsets)}")
    bits = DTYPE_BITS[dtype]
    for dim in shape:
        bits *= dim
    if bits != 8 * (offsets[1] - offsets[0]):
        text = f"has {8 * (offsets[1] - offsets[0])} bits of data; its dtype and shape need {bits}"
        raise CheckpointError(f"{title} {text}")
    return SafetensorsEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


def _check_cover(path: Path, entries: list[SafetensorsEntry], size: int) -> None:
    end = 0
    for entry in entries:
        if entry.start != end:
            what = "overlaps the one before it" if entry.start < end else "leaves a gap before it"
            raise CheckpointError(f"{path.name}: tensor {shown(entry.name)} {what}")
        end = entry.stop
    if end != size:
        text = f"its tensors need {end} bytes, the file has {size}; download it again"
        raise CheckpointError(f"{path.name}: {text}")
