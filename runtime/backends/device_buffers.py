"""The small inputs and the logits of a run: where they lie in host and device memory."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.base import Array
from trtllm_lite.runtime.backends.device import (
    ALIGNMENT,
    Device,
    DeviceMemoryError,
    HostBuffer,
)


class Staging:
    """Pinned host memory and device memory of one size, which grow together.

    `generation` counts up when an address changes. Nothing of it may be in use by queued work when
    it grows; the host part may not be written while a copy of it is queued.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host: HostBuffer | None = None
        self.address = 0
        self.generation = 0

    def grow(self, nbytes: int) -> HostBuffer:
        """The host part, of at least as many bytes. Raises DeviceMemoryError.

        It doubles: whatever was recorded with an address is lost when it changes, so that has to
        happen a few times only, however slowly the need grows.
        """
        if self._host is None or self._host.nbytes < nbytes:
            least = 0 if self._host is None else 2 * self._host.nbytes
            self.close()
            size = -(-max(nbytes, least) // ALIGNMENT) * ALIGNMENT
            host = self._device.allocate_host(size)
            try:
                self.address = self._device.allocate(size)
            except DeviceMemoryError:
                self._device.free(host.address)
                raise
            self._host = host
        return self._host

    def upload(self, nbytes: int) -> None:
        """Queue the copy of the first bytes to the device."""
        if self._host is not None and nbytes:
            self._device.copy(self.address, self._host.address, nbytes)

    def download(self, nbytes: int) -> None:
        """Queue the copy of the first bytes to the host."""
        if self._host is not None and nbytes:
            self._device.copy(self._host.address, self.address, nbytes)

    def close(self) -> None:
        """Give the memory back."""
        if self._host is not None:
            self._device.free(self._host.address)
            self._device.free(self.address)
            self._host = None
            self.generation += 1


def put(staging: Staging, arrays: Mapping[str, Array]) -> dict[str, int]:
    """Write the arrays into the staging memory, queue their copy to the device in one piece, and
    return where each of them will lie there. The places depend on the sizes alone."""
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = staging.grow(end)
    for name, array in arrays.items():
        place = offsets[name]
        host.array[place : place + array.nbytes].view(array.dtype)[:] = array.ravel()
    staging.upload(end)
    return {name: staging.address + place for name, place in offsets.items()}


def float_view(host: HostBuffer, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The beginning of a host buffer as float32."""
    size = int(np.prod(shape)) * 4
    return host.array[:size].view(np.float32).reshape(shape)
