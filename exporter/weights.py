"""Where weights come from: one tensor at a time, in pieces, never a whole checkpoint.

Files are read with plain reads into small buffers: a memory map would count every page that was
ever touched as resident.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_lite.exporter.arrangement import Arrangement
from trtllm_lite.exporter.calibration.scaling import Scaling
from trtllm_lite.exporter.checkpoint_guard import SafetensorsHeader, check_safetensors
from trtllm_lite.runtime.errors import CheckpointError, UnsupportedError

PIECE_BYTES = 32 * 2**20
SAFETENSORS_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}

Array = npt.NDArray[Any]


class WeightSource(Protocol):
    """Tensors by the name that the checkpoint gives them."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def pieces(self, name: str) -> Iterator[Array]:
        """The tensor's elements in order, as one or more flat arrays of a float dtype."""


@dataclass(frozen=True)
class _Stored:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


class SafetensorsSource:
    """One or more .safetensors files. Raises CheckpointError for headers that lie."""

    def __init__(self, files: list[Path]) -> None:
        self._stored: dict[str, _Stored] = {}
        for file in files:
            self._add(file, check_safetensors(file))

    def _add(self, file: Path, header: SafetensorsHeader) -> None:
        for entry in header.tensors:
            if entry.name in self._stored:
                other = self._stored[entry.name].file.name
                raise CheckpointError(f"tensor {entry.name} stands in {other} and in {file.name}")
            start = header.data_start + entry.start
            self._stored[entry.name] = _Stored(
                file, entry.dtype, entry.shape, start, entry.stop - entry.start
            )

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises UnsupportedError for a tensor whose type cannot be read, so that an export ends
        before it has written anything."""
        return self._readable(name).shape

    def pieces(self, name: str) -> Iterator[Array]:
        stored = self._readable(name)
        dtype = np.dtype(SAFETENSORS_DTYPES[stored.dtype])
        with stored.file.open("rb", buffering=0) as handle:
            handle.seek(stored.start)
            left = stored.length
            while left:
                piece = np.empty(min(left, PIECE_BYTES) // dtype.itemsize, dtype)
                if handle.readinto(piece.view(np.uint8).data) != piece.nbytes:
                    raise CheckpointError(f"{stored.file.name} ends inside tensor {name}")
                left -= piece.nbytes
                yield piece

    def _readable(self, name: str) -> _Stored:
        stored = self._stored[name]
        if stored.dtype not in SAFETENSORS_DTYPES:
            raise UnsupportedError(
                f"weights of type {stored.dtype} (tensor {name})",
                ", ".join(SAFETENSORS_DTYPES),
                "export from the unquantized checkpoint",
            )
        return stored


class MappedSource:
    """A source seen through the names of the graphs' weights.

    keys: parameter -> the name it is stored under. parts: weight -> the parameters whose rows it
    stacks. tables: weight -> numbers that the exporter made itself. offsets: weight -> a number
    that is added to its parameters, in float32. scalings: parameter -> how it changes before that.
    """

    def __init__(
        self,
        source: WeightSource,
        keys: Mapping[str, str],
        parts: Mapping[str, Sequence[str]] | None = None,
        tables: Mapping[str, Array] | None = None,
        offsets: Mapping[str, float] | None = None,
        scalings: Mapping[str, Scaling] | None = None,
        arrangements: Mapping[str, Arrangement] | None = None,
    ) -> None:
        self._source = source
        self._keys = dict(keys)
        self._parts = dict(parts or {})
        self._tables = dict(tables or {})
        self._offsets = dict(offsets or {})
        self._scalings = dict(scalings or {})
        self._arrangements = dict(arrangements or {})

    def scaled(self, scalings: Mapping[str, Scaling]) -> "MappedSource":
        """The same tensors, with these parameters scaled."""
        return MappedSource(
            self._source,
            self._keys,
            self._parts,
            self._tables,
            self._offsets,
            scalings,
            self._arrangements,
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter as it is stored, or of parts stacked by their rows."""
        if name in self._tables:
            return self._tables[name].shape
        shapes = [self._source.shape(self._keys[part]) for part in self._of(name)]
        if len(shapes) == 1:
            return shapes[0]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def pieces(self, name: str) -> Iterator[Array]:
        """Elements in order, as flat arrays; the parts one after the other."""
        if name in self._tables:
            yield self._tables[name].reshape(-1)
            return
        offset = self._offsets.get(name, 0.0)
        for part in self._of(name):
            for piece in self._arranged(part):
                yield piece.astype(np.float32) + np.float32(offset) if offset else piece

    def _arranged(self, part: str) -> Iterator[Array]:
        pieces, arrangement = self._scaled(part), self._arrangements.get(part)
        return pieces if arrangement is None else arrangement.applied(pieces, PIECE_BYTES)

    def _scaled(self, part: str) -> Iterator[Array]:
        key, scaling = self._keys[part], self._scalings.get(part)
        pieces = self._source.pieces(key)
        return pieces if scaling is None else scaling.applied(pieces, self._source.shape(key))

    def _of(self, name: str) -> Sequence[str]:
        return self._parts.get(name, (name,))
