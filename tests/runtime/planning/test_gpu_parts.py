"""The table's figures against what the chips are made of: units x clock, pins x data rate.

Sources: NVIDIA's architecture whitepapers (Turing, GA100, GA102, Ada, Hopper, Blackwell RTX) for
operations of an SM in a clock, and for numbers of SMs, clocks and memories of the GPUs that they
describe; NVIDIA's product briefs and datasheets for the others. Where a datasheet gives a rate and
no clock (H100 NVL, H200 NVL, Jetson, DGX Spark), the clock is the one that its float32 rate or its
list of clocks implies, and the check holds the other rates against it.
"""

from dataclasses import dataclass

import pytest

from trtllm_lite.runtime.planning.gpus import Gpu, read_gpus

TOLERANCE = 0.03
MULTIPLY_ADD = 2
"""A multiplication and an addition count as two."""


@dataclass(frozen=True)
class Sm:
    """One multiprocessor: float32 units, and pairs of a multiplication and an addition of its
    tensor cores in a clock, dense: of 16 bits with float32 sums; of 8 bits, as float and as
    integer, 0 where there is none."""

    cores: int
    half: int
    float8: int
    int8: int


TURING = Sm(cores=64, half=512, float8=0, int8=1_024)
GA100 = Sm(cores=64, half=1_024, float8=0, int8=2_048)
GA102 = Sm(cores=128, half=512, float8=0, int8=1_024)
GEFORCE_30 = Sm(cores=128, half=256, float8=0, int8=1_024)
AD102 = Sm(cores=128, half=512, float8=1_024, int8=1_024)
L40 = Sm(cores=128, half=256, float8=512, int8=512)
GEFORCE_40 = Sm(cores=128, half=256, float8=512, int8=1_024)
GH100 = Sm(cores=128, half=2_048, float8=4_096, int8=4_096)
GB100 = Sm(cores=128, half=4_096, float8=8_192, int8=8_192)
THOR = Sm(cores=128, half=4_096, float8=8_192, int8=0)
GB202 = Sm(cores=128, half=512, float8=1_024, int8=1_024)
GEFORCE_50 = Sm(cores=128, half=256, float8=512, int8=1_024)
GB10 = Sm(cores=128, half=512, float8=1_024, int8=0)
ORIN = Sm(cores=128, half=1_024, float8=0, int8=2_048)


@dataclass(frozen=True)
class Parts:
    """sms: how many. core_ghz, tensor_ghz: boost clocks of the float32 units and of the tensor
    cores. pins: bits of the memory bus. pin_gbits: 1e9 bits a second of each. memory_gb: of all
    chips together."""

    sm: Sm
    sms: int
    core_ghz: float
    tensor_ghz: float
    pins: int
    pin_gbits: float
    memory_gb: float


PARTS = {
    "b200": Parts(GB100, 148, 1.98, 1.86, 8_192, 7.5, 192),
    "h200": Parts(GH100, 132, 1.98, 1.83, 6_144, 6.25, 144),
    "h200-nvl": Parts(GH100, 132, 1.785, 1.545, 6_144, 6.25, 144),
    "h100": Parts(GH100, 132, 1.98, 1.83, 5_120, 5.24, 80),
    "h100-pcie": Parts(GH100, 114, 1.755, 1.62, 5_120, 3.186, 80),
    "h100-nvl": Parts(GH100, 132, 1.785, 1.545, 6_144, 5.1, 96),
    "a100": Parts(GA100, 108, 1.41, 1.41, 5_120, 3.186, 80),
    "a100-pcie": Parts(GA100, 108, 1.41, 1.41, 5_120, 3.024, 80),
    "a100-40gb": Parts(GA100, 108, 1.41, 1.41, 5_120, 2.43, 40),
    "a30": Parts(GA100, 56, 1.44, 1.44, 3_072, 2.43, 24),
    "l40s": Parts(AD102, 142, 2.52, 2.52, 384, 18, 48),
    "l40": Parts(L40, 142, 2.49, 2.49, 384, 18, 48),
    "l4": Parts(AD102, 58, 2.04, 2.04, 192, 12.5, 24),
    "a40": Parts(GA102, 84, 1.74, 1.74, 384, 14.5, 48),
    "a10": Parts(GA102, 72, 1.695, 1.695, 384, 12.5, 24),
    "t4": Parts(TURING, 40, 1.59, 1.59, 256, 10, 16),
    "rtx-pro-6000": Parts(GB202, 188, 2.617, 2.617, 512, 28, 96),
    "rtx-5090": Parts(GEFORCE_50, 170, 2.407, 2.407, 512, 28, 32),
    "rtx-6000-ada": Parts(AD102, 142, 2.505, 2.505, 384, 20, 48),
    "rtx-4090": Parts(GEFORCE_40, 128, 2.52, 2.52, 384, 21, 24),
    "rtx-a6000": Parts(GA102, 84, 1.8, 1.8, 384, 16, 48),
    "rtx-3090": Parts(GEFORCE_30, 82, 1.695, 1.695, 384, 19.5, 24),
    "thor": Parts(THOR, 20, 1.575, 1.575, 256, 8.533, 128),
    "spark": Parts(GB10, 48, 2.5, 2.5, 256, 8.533, 128),
    "orin": Parts(ORIN, 16, 1.3, 1.3, 256, 6.4, 64),
    "orin-nx": Parts(ORIN, 8, 0.918, 0.918, 128, 6.4, 16),
}
OF_SM = {
    75: {TURING},
    80: {GA100},
    86: {GA102, GEFORCE_30},
    87: {ORIN},
    89: {AD102, L40, GEFORCE_40},
    90: {GH100},
    100: {GB100},
    110: {THOR},
    120: {GB202, GEFORCE_50},
    121: {GB10},
}
NOT_ALL_SOLD = {"b200", "h200", "h200-nvl", "h100-nvl"}
"""Some of the memory of their chips is kept back."""
GPUS = pytest.mark.parametrize("gpu", read_gpus(), ids=lambda gpu: gpu.name)


def test_every_gpu_of_the_table_has_its_parts() -> None:
    assert PARTS.keys() == {gpu.name for gpu in read_gpus()}


@GPUS
def test_bandwidth_is_pins_times_data_rate(gpu: Gpu) -> None:
    parts = PARTS[gpu.name]
    derived = parts.pins * parts.pin_gbits * 1e9 / 8
    assert gpu.bandwidth == pytest.approx(derived, rel=TOLERANCE)


@GPUS
def test_rates_are_units_times_clock(gpu: Gpu) -> None:
    parts = PARTS[gpu.name]
    sm = parts.sm
    assert sm in OF_SM[gpu.sm]
    derived = {"float32": parts.sms * sm.cores * MULTIPLY_ADD * parts.core_ghz * 1e9}
    tensor = parts.sms * MULTIPLY_ADD * parts.tensor_ghz * 1e9
    for kind, units in (
        ("float16", sm.half),
        ("bfloat16", sm.half if gpu.sm >= 80 else 0),
        ("float8", sm.float8),
        ("int8", sm.int8),
    ):
        if units:
            derived[kind] = tensor * units
    assert gpu.flops.keys() == derived.keys()
    for kind, rate in derived.items():
        assert gpu.flops[kind] == pytest.approx(rate, rel=TOLERANCE), kind


@GPUS
def test_memory_is_that_of_the_chips(gpu: Gpu) -> None:
    sold = gpu.memory_gib
    if gpu.name in NOT_ALL_SOLD:
        assert 0.9 * PARTS[gpu.name].memory_gb <= sold < PARTS[gpu.name].memory_gb
    else:
        assert sold == PARTS[gpu.name].memory_gb
