"""The device that is memory of the host."""

import numpy as np
import pytest

from trtllm_lite.runtime.backends.device import ALIGNMENT, DeviceError, DeviceMemoryError
from trtllm_lite.runtime.backends.host_device import HostDevice


def test_memory_begins_aligned_and_zero() -> None:
    device = HostDevice()
    buffer = device.allocate_host(1000)
    assert buffer.address % ALIGNMENT == 0
    assert buffer.nbytes == 1000
    assert not buffer.array.any()


def test_copies_are_done_at_once() -> None:
    device = HostDevice()
    source, target = device.allocate_host(64), device.allocate_host(64)
    source.array[:] = np.arange(64)
    device.copy(target.address, source.address, 16)
    assert target.array[:17].tolist() == [*range(16), 0]
    device.copy_rows(target.address, 8, source.address, 32, 4, 2)
    assert target.array[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 32, 33, 34, 35]


@pytest.mark.parametrize("size", [4096, 100])
def test_zeroing(size: int) -> None:
    device = HostDevice()
    buffer = device.allocate_host(4096)
    buffer.array[:] = 7
    device.fill_zero(buffer.address, size)
    assert not buffer.array[:size].any()
    assert (buffer.array[size:] == 7).all()


def test_what_cannot_be_done_is_said() -> None:
    device = HostDevice()
    with pytest.raises(DeviceMemoryError):
        device.allocate(2**62)
    address = device.allocate(10)
    device.free(address)
    with pytest.raises(DeviceError, match="nothing was allocated"):
        device.free(address)
    with pytest.raises(DeviceError, match="recorded"):
        device.record(lambda: None)
