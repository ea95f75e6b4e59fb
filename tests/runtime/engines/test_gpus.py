"""Names of GPUs, and a driver that is not there."""

import ctypes
from typing import Any

import pytest

from trtllm_lite.runtime.engines.gpus import Gpu, current_gpu, parse_gpus
from trtllm_lite.runtime.errors import UsageError

HERE = Gpu("sm90", "580.1")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("sm89", ("sm89",)),
        ("sm120,sm86,SM89", ("sm86", "sm89", "sm120")),
        ("sm86,sm86", ("sm86",)),
        ("current", ("sm90",)),
        ("current,sm89", ("sm89", "sm90")),
    ],
)
def test_names(text: str, names: tuple[str, ...]) -> None:
    assert parse_gpus(text, HERE) == names


@pytest.mark.parametrize("text", ["", "h100", "sm", "sm8", "sm8900", "sm86,", "sm86 sm89"])
def test_bad_names(text: str) -> None:
    with pytest.raises(UsageError, match=r"--gpu: got .*; allowed: current, or compute"):
        parse_gpus(text, HERE)


def test_current_needs_a_gpu() -> None:
    with pytest.raises(UsageError, match="no NVIDIA GPU is seen here; name what to build for"):
        parse_gpus("current", None)


class FakeDriver:
    """The entry points of libcuda that are asked."""

    def __init__(self, *, status: int = 0, count: int = 1) -> None:
        self._status = status
        self._count = count

    def cuInit(self, flags: int) -> int:
        return self._status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._count
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = {75: 12, 76: 0}[attribute]
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13010
        return 0


def test_the_driver_is_asked() -> None:
    gpu = current_gpu(lambda name: FakeDriver())
    assert gpu is not None
    assert gpu.name == "sm120"
    assert gpu.driver


@pytest.mark.parametrize("driver", [FakeDriver(status=100), FakeDriver(count=0)])
def test_a_driver_without_a_gpu(driver: FakeDriver) -> None:
    assert current_gpu(lambda name: driver) is None


def test_no_driver() -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    assert current_gpu(missing) is None
