"""The one weights file of a bundle: every tensor once, streamed, hashed while it is written."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trtllm_lite.exporter.quantize.formats import FORMATS, Encoder
from trtllm_lite.exporter.quantize.quantizer import Quantizer
from trtllm_lite.exporter.weights import MappedSource
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.manifest import FileEntry
from trtllm_lite.runtime.progress import Progress

# Page alignment lets ONNX Runtime map the file instead of reading it.
ALIGNMENT = 4096
# Float32 bytes of the rows that are quantized at a time.
ROWS_BYTES = 8 * 2**20
FLOAT_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
NUMPY_DTYPES: dict[str, Any] = {
    **FLOAT_DTYPES,
    "uint8": np.uint8,
    "int8": np.int8,
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
}
IR_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "uint8": ir.DataType.UINT8,
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "float8e4m3fn": ir.DataType.FLOAT8E4M3FN,
}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Recipe:
    """How bytes are made from the weight `source`: by rows of [rows, columns] in a weight `format`,
    where `parts` are the parameters it is made of and `scales` is the type of its scales; or, with
    format None, element by element."""

    source: str
    parts: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    format: str | None = None
    scales: str = "float32"


@dataclass(frozen=True)
class Stored:
    """One initializer in the weights file. `part` is its suffix in the recipe's format.

    same_bytes_as: another stored tensor that this is a second view of.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    recipe: Recipe
    part: str = ""
    same_bytes_as: str | None = None

    @property
    def nbytes(self) -> int:
        if self.dtype == "int4":
            return -(-prod(self.shape) // 2)
        return prod(self.shape) * int(np.dtype(NUMPY_DTYPES[self.dtype]).itemsize)


@dataclass(frozen=True)
class Placed:
    """Where a tensor stands in the weights file, in bytes."""

    offset: int
    length: int


def plain(values: Mapping[str, ir.Value]) -> list[Stored]:
    """Weights that are stored as they are, in the type that the graph gives them."""
    names = {kind: name for name, kind in IR_DTYPES.items()}
    return [
        Stored(name, names[value.dtype or ir.DataType.FLOAT], tuple(_shape(value)), Recipe(name))
        for name, value in values.items()
    ]


def in_order(stored: Iterable[Stored], order: Sequence[str]) -> list[Stored]:
    """Each tensor once, sorted by where its source stands in `order`, plain ones first: all that is
    made from one source stands together, and so the source is read once."""
    rank = {name: i for i, name in enumerate(order)}
    once = {s.name: s for s in stored}
    return sorted(once.values(), key=lambda s: (rank[s.recipe.source], s.recipe.format or ""))


def layout(stored: Sequence[Stored]) -> tuple[dict[str, Placed], int]:
    """Place every tensor, aligned, in order. Returns the places and the size of the file."""
    places: dict[str, Placed] = {}
    end = 0
    for tensor in stored:
        if tensor.same_bytes_as is None:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            places[tensor.name] = Placed(offset, tensor.nbytes)
            end = offset + tensor.nbytes
    for tensor in stored:
        if tensor.same_bytes_as is not None:
            places[tensor.name] = places[tensor.same_bytes_as]
    return places, end


def write_weights(
    path: Path,
    stored: Sequence[Stored],
    source: MappedSource,
    quantizer: Quantizer,
    progress: Progress,
) -> FileEntry:
    """Write the file, as `layout` places it, and return its entry. Reads each source once and
    holds one piece of it, and of a quantized one the parts after the first.

    Raises UnsupportedError when a value does not fit its dtype.
    """
    writer = _Writer(path)
    places, total = layout(stored)
    apart = [s for s in stored if s.same_bytes_as is None]
    with path.open("wb") as handle:
        for _, group in groupby(apart, key=lambda s: s.recipe.source):
            for tensor, piece in _made(list(group), source, quantizer):
                if writer.size < places[tensor.name].offset:
                    writer.pad_to(handle, places[tensor.name].offset)
                writer.write(handle, piece)
                progress.advance(writer.size, total, "bytes")
        writer.pad_to(handle, total)
    return writer.entry()


def bind(model: ir.Model, stored: Sequence[Stored], file: str) -> None:
    """Point the model's data-less initializers at their places in the weights file."""
    places, _ = layout(stored)
    by_name = {s.name: s for s in stored}
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            place, shape = places[name], ir.Shape(_shape(value))
            value.const_value = ir.ExternalTensor(
                file,
                place.offset,
                place.length,
                IR_DTYPES[by_name[name].dtype],
                shape=shape,
                name=name,
            )


def _made(
    group: Sequence[Stored], source: MappedSource, quantizer: Quantizer
) -> Iterator[tuple[Stored, Array]]:
    """The bytes of all tensors that are made from one source, in file order."""
    casts = [s for s in group if s.recipe.format is None]
    for tensor in casts:
        for piece in source.pieces(tensor.recipe.source):
            yield tensor, _converted(piece, tensor.dtype, tensor.name)
    coded = group[len(casts) :]
    if coded:
        yield from _encoded(coded, source, quantizer)


def _encoded(
    group: Sequence[Stored], source: MappedSource, quantizer: Quantizer
) -> Iterator[tuple[Stored, Array]]:
    """The first tensor as it is made, the others when all rows were read."""
    encoders = {s.recipe.format: _encoder(s.recipe, quantizer) for s in group}
    kept: dict[str, list[Array]] = {}
    first, *others = group
    for name, rows in _rows(group[0].recipe, source):
        for kind, encoder in encoders.items():
            made = encoder.add(name, rows)
            if kind == first.recipe.format:
                yield first, made
            else:
                kept.setdefault(_first_part(kind), []).append(made)
    for encoder in encoders.values():
        kept.update({part: [array] for part, array in encoder.rest().items()})
    for tensor in others:
        for array in kept.pop(tensor.part):
            yield tensor, _converted(array, tensor.dtype, tensor.name)


def _encoder(recipe: Recipe, quantizer: Quantizer) -> Encoder:
    assert recipe.format is not None
    rows, columns = recipe.shape
    return FORMATS[recipe.format].encoder(rows, columns, quantizer, recipe.scales)


def _first_part(kind: str | None) -> str:
    assert kind is not None
    return FORMATS[kind].parts[0].suffix


def _rows(recipe: Recipe, source: MappedSource) -> Iterator[tuple[str, Array]]:
    """A parameter's name and some of its rows, float32 [n, columns]; all rows in order."""
    columns = recipe.shape[1]
    most = max(1, ROWS_BYTES // (4 * columns)) * columns
    for name in recipe.parts:
        rest = np.empty(0, np.float32)
        for piece in source.pieces(name):
            for start in range(0, len(piece), most):
                chunk = _converted(piece[start : start + most], "float32", name)
                rest = np.concatenate([rest, chunk]) if len(rest) else chunk
                whole = len(rest) // columns * columns
                if whole:
                    yield name, rest[:whole].reshape(-1, columns)
                rest = rest[whole:]


def _shape(value: ir.Value) -> list[int]:
    assert value.shape is not None
    return [int(d) for d in value.shape.numpy()]


def _converted(piece: Array, dtype: str, name: str) -> Array:
    target = np.dtype(NUMPY_DTYPES[dtype])
    # Overflow is looked for below; signalling NaNs are the checkpoint's own affair.
    with np.errstate(over="ignore", invalid="ignore"):
        out = piece.astype(target, copy=False)
        narrower = piece.dtype != target and piece.dtype.itemsize >= target.itemsize
        if narrower and (np.isinf(out) & np.isfinite(piece)).any():
            raise _overflow(dtype, name)
    return out


def _overflow(dtype: str, name: str) -> UnsupportedError:
    largest = {d: float(ml_dtypes.finfo(FLOAT_DTYPES[d]).max) for d in FLOAT_DTYPES}
    wider = [d for d in FLOAT_DTYPES if largest[d] > largest[dtype]]
    action = f"export with --dtype {wider[-1]}" if wider else "scale the checkpoint's weights"
    return UnsupportedError(
        f"a wider type than {dtype} (values over {largest[dtype]:.6g} in {name})",
        f"{' and '.join(wider) or 'no wider type'} for this checkpoint",
        action,
    )


class _Writer:
    """Counts and hashes what goes to the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self.size = 0

    def pad_to(self, handle: BinaryIO, offset: int) -> None:
        self._put(handle, bytes(offset - self.size))

    def write(self, handle: BinaryIO, array: Array) -> None:
        self._put(handle, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _put(self, handle: BinaryIO, data: bytes | memoryview) -> None:
        handle.write(data)
        self._hash.update(data)
        self.size += len(data)

    def entry(self) -> FileEntry:
        return FileEntry(self._path.name, self.size, self._hash.hexdigest())
