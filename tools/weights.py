"""What the weights of a graph are: the initializers of an ONNX file, without the onnx package.

Field numbers are those of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from trtllm_lite.runtime.native_table import TABLE_NAME, from_json
from trtllm_lite.runtime.onnx_wire import ELEMENT_BITS
from trtllm_lite.runtime.protobuf import Field, Reader

_MODEL_GRAPH, _GRAPH_INITIALIZER = 7, 5
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA = 1, 2, 8, 13

# TensorProto.DataType
DTYPE_NAMES = {
    **{1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64"},
    **{9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16"},
    **{17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2", 20: "float8e5m2fnuz"},
    **{21: "uint4", 22: "int4", 23: "float4e2m1"},
}


# Names of tables of which a token reads one row, not all.
ROTARY = "rotary."


@dataclass(frozen=True)
class Weight:
    """One initializer. `place` is (file, offset) of external data, or ("", its name) inside."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    place: tuple[str, str]


@dataclass(frozen=True)
class WeightGroup:
    """All weights of one element type, each counted once however many graphs use it."""

    dtype: str
    tensors: int
    elements: int
    nbytes: int


def read_weights(path: Path) -> list[Weight]:
    """The initializers of the main graph. Raises ValueError for bytes that are not ONNX."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = Reader(data)
        return [_weight(reader, field) for field in _initializers(reader, len(data))]


def weight_groups(weights: Iterable[Weight]) -> list[WeightGroup]:
    """Groups by element type, largest first; a weight that two graphs share counts once."""
    groups: dict[str, list[Weight]] = {}
    for weight in {w.place: w for w in weights}.values():
        groups.setdefault(weight.dtype, []).append(weight)
    made = [
        WeightGroup(dtype, len(ws), sum(prod(w.shape) for w in ws), sum(w.nbytes for w in ws))
        for dtype, ws in groups.items()
    ]
    return sorted(made, key=lambda group: -group.nbytes)


def packed_bytes(bundle: Path) -> int:
    """Bytes of weights that one token reads with the native kernels: all of their data file but
    its plain copies (norms, which are small, and rotary tables). A tied embedding is the head,
    which is read whole. Raises BundleError for a bundle whose table is not readable."""
    table = from_json((bundle / TABLE_NAME).read_bytes())
    return table.size - sum(copy.length for copy in table.copies)


def graph_bytes(graph: Path) -> int:
    """Bytes of weights that one token reads with a decode graph, each counted once: a little less
    where an embedding table is not also the output layer."""
    weights = {w.place: w for w in read_weights(graph) if not w.name.startswith(ROTARY)}
    return sum(weight.nbytes for weight in weights.values())


def _initializers(reader: Reader, size: int) -> Iterator[Field]:
    for graph in reader.fields(0, size):
        if graph.number == _MODEL_GRAPH and graph.value is None:
            for field in reader.fields(graph.start, graph.stop):
                if field.number == _GRAPH_INITIALIZER and field.value is None:
                    yield field


def _weight(reader: Reader, tensor: Field) -> Weight:
    name, data_type = "", 0
    dims: list[int] = []
    entries: dict[str, str] = {}
    for field in reader.fields(tensor.start, tensor.stop):
        if field.number == _DIMS:
            dims.extend(reader.numbers(field))
        elif field.number == _DATA_TYPE and field.value is not None:
            data_type = field.value
        elif field.number == _NAME and field.value is None:
            name = reader.text(field)
        elif field.number == _EXTERNAL_DATA and field.value is None:
            entries.update([_entry(reader, field)])
    nbytes = (prod(dims) * ELEMENT_BITS.get(data_type, 0) + 7) // 8
    inside = ("", name)
    place = (entries["location"], entries.get("offset", "0")) if "location" in entries else inside
    dtype = DTYPE_NAMES.get(data_type, f"type {data_type}")
    return Weight(name, dtype, tuple(dims), nbytes, place)


def _entry(reader: Reader, entry: Field) -> tuple[str, str]:
    texts = {f.number: reader.text(f) for f in reader.fields(entry.start, entry.stop)}
    return texts.get(1, ""), texts.get(2, "")
