"""The table of GPUs: names lead to one entry, and figures are possible ones."""

from itertools import combinations

import pytest

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.planning.gpus import GIB, Gpu, find_gpu, read_gpus

GPUS = pytest.mark.parametrize("gpu", read_gpus(), ids=lambda gpu: gpu.name)


@GPUS
def test_figures_are_possible(gpu: Gpu) -> None:
    assert 75 <= gpu.sm <= 121
    assert 8 * GIB <= gpu.memory_bytes <= 400 * GIB
    assert 50e9 <= gpu.bandwidth <= 10e12
    assert 1e12 <= gpu.flops["float32"] < gpu.flops["float16"] <= 5e15
    # A byte that is read is multiplied with between a hundred and a thousand times.
    assert 60 < gpu.flops["float16"] / gpu.bandwidth < 1000


@GPUS
def test_types_are_those_of_the_generation(gpu: Gpu) -> None:
    assert ("bfloat16" in gpu.flops) == (gpu.sm >= 80)
    assert ("float8" in gpu.flops) == (gpu.sm >= 89)
    assert gpu.flops.get("bfloat16", gpu.flops["float16"]) == gpu.flops["float16"]
    for eight_bits in gpu.flops.keys() & {"float8", "int8"}:
        assert gpu.flops[eight_bits] / gpu.flops["float16"] == pytest.approx(2, rel=0.02) or (
            eight_bits == "int8" and gpu.name.startswith("rtx-")
        )


@GPUS
def test_every_figure_has_a_source(gpu: Gpu) -> None:
    assert "NVIDIA" in gpu.source
    assert any(word in gpu.source for word in ("datasheet", "whitepaper", "brief"))


@GPUS
def test_every_name_leads_to_its_gpu(gpu: Gpu) -> None:
    for name in (gpu.name, gpu.title, gpu.name.upper(), *gpu.aliases):
        assert find_gpu(name) is gpu


def test_names_are_different() -> None:
    for one, other in combinations(read_gpus(), 2):
        assert not {one.name, *one.aliases} & {other.name, *other.aliases}


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_drivers_names_are_found(driver_name: str, name: str) -> None:
    assert find_gpu(driver_name).name == name


@pytest.mark.parametrize("name", ["", "nvidia", "?", "mi300x"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"--gpu: got '.*'; allowed: b200, .* t4,.*, current$"):
        find_gpu(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("h1000", "h100 or "),
        ("NVIDIA H100 PCIe 96 GB", "h100-pcie"),
        ("rtx 4080", "rtx-4090"),
        ("a100-80", "a100"),
        ("5090", "rtx-5090"),
        ("jetson", "thor or orin"),
    ],
)
def test_names_that_are_near_are_suggested(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=rf"did you mean .*{near}"):
        find_gpu(name)


def test_error_correction_in_the_memory_takes_a_sixteenth() -> None:
    assert find_gpu("l4").memory_bytes == 22.5 * GIB
    assert find_gpu("h100").memory_bytes == 80 * GIB
