"""Makes the data file of a bundle's native graph on the machine that is to run it."""

import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.bundle import Bundle, check_graph
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.host_cache import PrepareError, Preparer
from trtllm_lite.runtime.kv_dtype import KVDtype
from trtllm_lite.runtime.mapped_weights import rewrite
from trtllm_lite.runtime.native_table import (
    DATA_NAME,
    GRAPHS,
    MAX_TABLE_BYTES,
    TABLE_NAME,
    VERSION,
    NativeTable,
    PackedWeight,
    from_json,
    graph_names,
)
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.runtime.protobuf import WireError

NAME = "native"
WRITTEN = 1
"""Counts up when the same data are written in another way."""

Bytes = npt.NDArray[np.uint8]


def has_native(bundle: Bundle) -> bool:
    """Whether the bundle brings a graph over the native kernels."""
    return all(bundle.has(name) for name in (TABLE_NAME, *GRAPHS.values()))


def cache_dtypes(bundle: Bundle) -> tuple[KVDtype, ...]:
    """The types of cache that the native graphs have, first the one that the bundle was made for;
    empty without graphs that this runtime knows."""
    try:
        return read_table(bundle).kv_dtypes if has_native(bundle) else ()
    except BundleError:
        return ()


def native_preparer(bundle: Bundle) -> Preparer:
    """Prepares the native graphs and their data, `DATA_NAME`, in one folder."""

    def prepare(folder: Path, progress: Progress) -> None:
        progress.step("pack the weights for this machine")
        try:
            table = read_table(bundle)
            for name in graph_names(table.kv_dtypes):
                shutil.copyfile(bundle.path(name), folder / name)
                with (folder / name).open("rb") as file:
                    check_graph(file.fileno(), {DATA_NAME: table.size})
            write_data(bundle.path(bundle.manifest.weights), folder / DATA_NAME, table, progress)
        except BundleError as error:
            raise PrepareError(str(error)) from error
        except WireError as error:
            raise PrepareError(f"native graph: {error}") from error

    return Preparer(NAME, f"{VERSION}.{WRITTEN}", prepare)


def read_table(bundle: Bundle) -> NativeTable:
    """The bundle's table. Raises BundleError, also for a version that this runtime lacks."""
    path = bundle.path(TABLE_NAME)
    if path.stat().st_size > MAX_TABLE_BYTES:
        raise BundleError(TABLE_NAME, f"is larger than {MAX_TABLE_BYTES} bytes")
    table = from_json(path.read_bytes())
    if table.version != VERSION:
        said = f"version {table.version}; this runtime knows {VERSION}; export again"
        raise BundleError(TABLE_NAME, said)
    return table


def write_data(source: Path, target: Path, table: NativeTable, progress: Progress) -> None:
    """Write the data file. Holds some panels of one weight at a time.

    Raises BundleError for a table that points outside a file, OSError.
    """
    weights: Bytes = np.zeros(0, np.uint8)
    if source.stat().st_size > 0:
        weights = np.memmap(source, np.uint8, mode="r")
    done = 0
    pieces = target.with_suffix(".pieces")
    with pieces.open("wb") as file:
        os.truncate(file.fileno(), table.size)
        for copy in table.copies:
            _put(file, table, copy.target, _cut(weights, copy.source, copy.length))
        for weight in table.weights:
            _pack(file, table, weights, weight)
            done += int(np.prod(weight.packing.codes_shape))
            progress.advance(done, table.size, "bytes")
    rewrite(pieces, target)
    pieces.unlink()


def _pack(file: BinaryIO, table: NativeTable, weights: Bytes, weight: PackedWeight) -> None:
    p = weight.packing
    codes = _cut(weights, weight.codes[0], p.n * p.source_row_bytes).reshape(p.n, -1)
    scale = _cut(weights, weight.scale[0], 4 * p.n * p.blocks).view(np.float32).reshape(p.n, -1)
    zero = None
    if weight.zero is not None:
        zero = _cut(weights, weight.zero[0], p.n * p.source_zero_bytes).reshape(p.n, -1)
    at = [weight.codes[1], weight.scale[1], 0 if weight.zero is None else weight.zero[1]]
    try:
        for pieces in p.packed(codes, scale, zero):
            for i, piece in enumerate(pieces):
                if piece is not None:
                    at[i] += _put(file, table, at[i], piece.reshape(-1).view(np.uint8))
    except ValueError as error:
        place = f"the weight at byte {weight.codes[0]} cannot be packed: {error}; export again"
        raise BundleError(TABLE_NAME, place) from error


def _cut(weights: Bytes, offset: int, length: int) -> Bytes:
    if offset + length > len(weights):
        raise BundleError(TABLE_NAME, f"points at byte {offset + length} of {len(weights)}")
    return weights[offset : offset + length]


def _put(file: BinaryIO, table: NativeTable, offset: int, data: Bytes) -> int:
    if offset + len(data) > table.size:
        raise BundleError(TABLE_NAME, f"writes at byte {offset + len(data)} of {table.size}")
    file.seek(offset)
    return file.write(data.data)
