"""A prepared file of weights as tensors in memory: one mapping, in large pages where it can be.

ONNX Runtime maps each tensor for itself, and pieces of a megabyte cannot be in pages of 2 MB. Small
pages are read at 24 GB/s, large ones at 32 (two threads, Zen 4), and each decode step reads all
weights once. The mapping stays shared: other sessions and processes have the same memory.
"""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.onnx_wire import external_data
from trtllm_lite.runtime.protobuf import WireError

Array = npt.NDArray[Any]

BLOCK = 64 * 2**20
# TensorProto.DataType of what our graphs keep outside of themselves.
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    4: np.dtype(np.uint16),
    6: np.dtype(np.int32),
    7: np.dtype(np.int64),
    10: np.dtype(np.float16),
}


def map_weights(graph: Path, data: Path) -> Mapping[str, Array]:
    """The tensors of a graph that lie in `data`, read-only, by name. They hold the mapping; nothing
    is read yet. Raises BundleError for a graph that does not fit the file, OSError."""
    memory = _mapped(data)
    try:
        with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            items = [item for item in external_data(raw) if item.location == data.name]
        return {
            item.name: np.frombuffer(
                memory, _DTYPES[item.data_type], int(np.prod(item.dims)), item.offset
            ).reshape(item.dims)
            for item in items
        }
    except (KeyError, ValueError, WireError) as error:
        raise BundleError(graph.name, f"does not fit {data.name}: {error}") from error


def rewrite(source: Path, target: Path) -> None:
    """Copy a file by large writes, after which Linux keeps it in large pages (6.16 and later for
    ext4); what is written piece by piece stays in small ones. Raises OSError."""
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        while block := read.read(BLOCK):
            view = memoryview(block)
            while view:
                view = view[write.write(view) :]


def _mapped(path: Path) -> mmap.mmap | bytes:
    if path.stat().st_size == 0:
        return b""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # For what has yet to be read from the disk.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
