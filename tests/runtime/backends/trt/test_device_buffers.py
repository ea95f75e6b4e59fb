"""Staging memory: how it grows, and what is left when it cannot."""

import pytest

from trtllm_lite.runtime.backends.device import DeviceMemoryError
from trtllm_lite.runtime.backends.device_buffers import Staging
from trtllm_lite.runtime.backends.fake_device import FakeDevice


def test_addresses_change_a_few_times_however_slowly_the_need_grows() -> None:
    device = FakeDevice()
    staging = Staging(device)
    for nbytes in range(1, 20_000, 100):
        assert staging.grow(nbytes).nbytes >= nbytes
    assert staging.generation < 10
    assert len(device.addresses) == 2
    before, address = staging.generation, staging.address
    staging.grow(100)
    assert (staging.generation, staging.address) == (before, address)


def test_what_does_not_fit_leaves_nothing_behind_and_less_is_had_again() -> None:
    device = FakeDevice(total=10_000)
    staging = Staging(device)
    staging.grow(4096)
    before = staging.generation
    with pytest.raises(DeviceMemoryError):
        staging.grow(20_000)
    assert (device.addresses, staging.generation) == ((), before + 1)
    assert staging.grow(6000).nbytes >= 6000
