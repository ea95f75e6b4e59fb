"""The one weights file of a bundle: every tensor once, streamed, hashed while it is written."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trtllm_lite.exporter.weights import MappedSource
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.manifest import FileEntry
from trtllm_lite.runtime.progress import Progress

# Page alignment lets ONNX Runtime map the file instead of reading it.
ALIGNMENT = 4096
NUMPY_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
IR_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Placed:
    """Where a tensor stands in the weights file, in bytes."""

    offset: int
    length: int


def layout(values: Mapping[str, ir.Value], dtype: str) -> tuple[dict[str, Placed], int]:
    """Place every tensor, aligned, in order. Returns the places and the size of the file."""
    size = np.dtype(NUMPY_DTYPES[dtype]).itemsize
    places: dict[str, Placed] = {}
    end = 0
    for name, value in values.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        length = int(np.prod(_shape(value), dtype=np.int64)) * size
        places[name] = Placed(offset, length)
        end = offset + length
    return places, end


def write_weights(
    path: Path,
    places: Mapping[str, Placed],
    source: MappedSource,
    dtype: str,
    progress: Progress,
) -> FileEntry:
    """Write the file and return its entry. Holds one piece of one tensor at a time.

    Raises UnsupportedError when a value does not fit the dtype.
    """
    writer = _Writer(path)
    total = max(p.offset + p.length for p in places.values())
    with path.open("wb") as handle:
        for name, place in places.items():
            writer.pad_to(handle, place.offset)
            for piece in source.pieces(name):
                writer.write(handle, _converted(piece, dtype, name))
                progress.advance(writer.size, total, "bytes")
    return writer.entry()


def bind(model: ir.Model, places: Mapping[str, Placed], file: str, dtype: str) -> None:
    """Point the model's data-less initializers at their places in the weights file."""
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            place, shape = places[name], ir.Shape(_shape(value))
            value.const_value = ir.ExternalTensor(
                file, place.offset, place.length, IR_DTYPES[dtype], shape=shape, name=name
            )


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
    largest = {d: float(ml_dtypes.finfo(NUMPY_DTYPES[d]).max) for d in NUMPY_DTYPES}
    wider = [d for d in NUMPY_DTYPES if largest[d] > largest[dtype]]
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
        self._put(handle, array.view(np.uint8).data)

    def _put(self, handle: BinaryIO, data: bytes | memoryview) -> None:
        handle.write(data)
        self._hash.update(data)
        self.size += len(data)

    def entry(self) -> FileEntry:
        return FileEntry(self._path.name, self.size, self._hash.hexdigest())


def iter_shapes(values: Mapping[str, ir.Value]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each weight."""
    for name, value in values.items():
        yield name, tuple(_shape(value))
