"""Weights that several plans read in one place: copied to the device once, from the bundle's file.

Each matrix begins at a multiple of what TensorRT wants of an input; matrices that are the same
bytes of the file are the same bytes on the device.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod

from trtllm_lite.runtime.backends.device import (
    ALIGNMENT,
    Device,
    DeviceError,
    DeviceMemoryError,
    HostBuffer,
)
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.bundle_files import open_folder, open_inside
from trtllm_lite.runtime.engines.record import RECORD_NAME, SharedWeight
from trtllm_lite.runtime.errors import BundleError, UsageError
from trtllm_lite.runtime.manifest import FileEntry

PIECE_BYTES = 64 * 2**20
"""Most pinned memory that the copy passes through."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8e4m3fn": 1}

Range = tuple[int, int]
"""Offset and length in the file."""


@dataclass(frozen=True)
class WeightsOnDevice:
    """Where each weight lies, and how many bytes there are of all."""

    addresses: Mapping[str, int]
    nbytes: int


def upload_weights(
    device: Device, bundle: Bundle, weights: Collection[SharedWeight]
) -> WeightsOnDevice:
    """Copy the weights of a bundle, whose files were checked when it was opened, into one new
    allocation. Raises BundleError for weights that are not wholly in the bundle's file, UsageError
    where there is not that much memory, DeviceError."""
    if not weights:
        return WeightsOnDevice({}, 0)
    (entry,) = (e for e in bundle.manifest.files if e.path == bundle.manifest.weights)
    check_weights(weights, entry)
    places, size = _places(weights)
    try:
        base = device.allocate(size)
    except DeviceMemoryError as error:
        raise UsageError(
            f"the weights take {size / 2**20:.0f} MiB, which {device.name} does not have free; "
            "export with a smaller weight format"
        ) from error
    _copy(device, bundle, entry, {r: base + place for r, place in places.items()})
    addresses = {w.name: base + places[w.offset, w.length] for w in weights}
    return WeightsOnDevice(addresses, size)


def check_weights(weights: Collection[SharedWeight], entry: FileEntry) -> None:
    """Raise BundleError unless every weight has a name of its own, as many bytes as its shape
    needs, and all of them in the file."""
    if len({w.name for w in weights}) != len(weights):
        raise BundleError(f"{RECORD_NAME}: weights", "two have one name")
    for w in weights:
        field = f"{RECORD_NAME}: {w.name}"
        if w.dtype not in ITEM_BYTES or min(w.shape, default=0) < 1:
            raise BundleError(field, f"is {w.dtype} {list(w.shape)}, which cannot be shared")
        if w.length != prod(w.shape) * ITEM_BYTES[w.dtype]:
            raise BundleError(field, f"has {w.length} bytes, not those of its shape")
        if w.offset < 0 or w.offset + w.length > entry.size:
            raise BundleError(field, f"is not inside {entry.path}")


def _places(weights: Collection[SharedWeight]) -> tuple[dict[Range, int], int]:
    """Where every range of the file goes, and the size of all, in bytes."""
    places: dict[Range, int] = {}
    end = 0
    for place in sorted({(w.offset, w.length) for w in weights}):
        places[place] = end
        end += -(-place[1] // ALIGNMENT) * ALIGNMENT
    return places, end


def _copy(device: Device, bundle: Bundle, entry: FileEntry, targets: Mapping[Range, int]) -> None:
    piece = min(PIECE_BYTES, max(length for _, length in targets))
    buffer = device.allocate_host(piece)
    try:
        with (
            open_folder(bundle.folder) as folder,
            open_inside(folder, entry.path, entry.path) as fd,
        ):
            for (offset, length), target in targets.items():
                for start in range(0, length, piece):
                    count = min(piece, length - start)
                    _read(fd, buffer, offset + start, count, entry)
                    device.copy(target + start, buffer.address, count)
                    # The buffer is written again at once.
                    device.synchronize()
    finally:
        with suppress(DeviceError):
            device.free(buffer.address)


def _read(fd: int, buffer: HostBuffer, offset: int, count: int, entry: FileEntry) -> None:
    view = buffer.array.data[:count]
    done = 0
    while done < count:
        got = os.preadv(fd, [view[done:]], offset + done)
        if not got:
            raise BundleError(entry.path, "is shorter than it was when the bundle was opened")
        done += got
