"""Which TensorRT is used, and what is said where there is none."""

from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.runtime.engines.trt_module import (
    NoTensorRTError,
    installed_tensorrt,
    require_tensorrt,
)
from trtllm_lite.runtime.errors import UsageError


def native(version: str = "11.4.0.106") -> Any:
    kinds = SimpleNamespace() if version.startswith("11") else None
    module = SimpleNamespace(__version__=version)
    if kinds is not None:
        module.CausalMaskKind = kinds
    return module


def rtx_module(version: str = "1.7.1.116") -> Any:
    members = dict.fromkeys(("NONE", "CURRENT", "SM75", "SM120", "SM89"))
    return SimpleNamespace(
        __version__=version, ComputeCapability=SimpleNamespace(__members__=members)
    )


def importing(**modules: Any) -> Any:
    def importer(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(name=name)
        if isinstance(modules[name], Exception):
            raise modules[name]
        return modules[name]

    return importer


BOTH = importing(tensorrt=native(), tensorrt_rtx=rtx_module())


def test_the_gpu_of_the_machine_is_for_tensorrt() -> None:
    found = require_tensorrt(("sm90",), "sm90", BOTH)
    assert (found.flavour, found.words) == ("tensorrt", "TensorRT 11.4.0.106")


def test_named_gpus_are_for_rtx() -> None:
    found = require_tensorrt(("sm89", "sm120"), "sm90", BOTH)
    assert found.flavour == "tensorrt_rtx"
    assert found.nameable_gpus == ("sm75", "sm89", "sm120")


def test_both_are_listed() -> None:
    assert [t.flavour for t in installed_tensorrt(BOTH)] == ["tensorrt", "tensorrt_rtx"]
    assert installed_tensorrt(importing()) == ()


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({}, "TensorRT is not installed; TensorRT-RTX is not installed; pip install"),
        (
            {"tensorrt": ImportError("libnvinfer.so.11: cannot open")},
            "TensorRT does not load (libnvinfer.so.11: cannot open)",
        ),
        ({"tensorrt": native("10.3.0")}, "TensorRT 10.3.0 is older than 10.16"),
        ({"tensorrt_rtx": rtx_module("1.2.0.54")}, "TensorRT-RTX 1.2.0.54 is older than 1.7"),
        ({"tensorrt": SimpleNamespace()}, "TensorRT ? is older than 10.16"),
    ],
)
def test_why_there_is_none(modules: dict[str, Any], said: str) -> None:
    with pytest.raises(NoTensorRTError) as caught:
        require_tensorrt(("sm89",), None, importing(**modules))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_gpu_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"--gpu sm90: TensorRT-RTX .* builds for sm75, sm89"):
        require_tensorrt(("sm90",), None, importing(tensorrt_rtx=rtx_module()))


@pytest.mark.parametrize("gpus", [("sm89",), ("sm89", "sm90")])
def test_tensorrt_builds_for_no_other_machine(gpus: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="for the GPU of this machine only, sm90; build there"):
        require_tensorrt(gpus, "sm90", importing(tensorrt=native()))


def test_row_lengths_came_with_11() -> None:
    for version, has in (("10.16.1.11", False), ("11.4.0.106", True)):
        (found,) = installed_tensorrt(importing(tensorrt=native(version)))
        assert found.has_row_lengths is has
