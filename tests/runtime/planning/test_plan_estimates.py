"""Estimates of TensorRT's memory against what TensorRT-RTX 1.7.1.116 reported of plans that it
built on a CPU, and against the memory that the building process took."""

from dataclasses import dataclass

import pytest

from trtllm_lite.runtime.engines.profiles import CHUNK_LOGITS, CHUNK_ROWS, EngineLimits
from trtllm_lite.runtime.planning.memory import PlanRun, build_bytes

TOLERANCE = 0.15


@dataclass(frozen=True)
class Model:
    """Sizes of a float16 model: `width` of its widest layer, gate and up together."""

    hidden: int
    heads_width: int
    width: int
    vocab_size: int
    weight_bytes: int
    layers: int


SMOLLM2 = Model(576, 576, 3_072, 49_152, 269_292_160, 30)
SMALL = Model(512, 512, 4_096, 32_000, 48_239_616, 2)
WIDE = Model(2_048, 2_048, 16_384, 32_000, 374_624_256, 2)
MIB = 2**20


@dataclass(frozen=True)
class Build:
    """What was built and reported, in bytes; 0 where that was not recorded. host: the most resident
    memory of the process that built one plan."""

    model: Model
    limits: EngineLimits
    prefill: int
    decode: int
    extend: int
    host: int

    def run(self, rows: int, tokens: int, logits: int) -> PlanRun:
        model = self.model
        return PlanRun(
            rows=rows,
            tokens=rows * tokens,
            capacity=self.limits.capacity,
            logit_bytes=4 * rows * logits * model.vocab_size,
            hidden=model.hidden,
            query_width=model.heads_width,
            width=model.width,
            element_bytes=2,
        )

    @property
    def step(self) -> PlanRun:
        return self.run(self.limits.max_num_seqs, 1, 1)

    @property
    def chunk(self) -> PlanRun:
        rows = min(CHUNK_ROWS, self.limits.max_num_seqs)
        return self.run(rows, self.limits.max_chunk, CHUNK_LOGITS)


BUILDS = {
    "smollm2-32": Build(
        model=SMOLLM2,
        limits=EngineLimits(32, 2_048, 512),
        prefill=30_274_048,
        decode=11_515_392,
        extend=33_077_760,
        host=1_414 * MIB,
    ),
    "smollm2-8": Build(
        model=SMOLLM2,
        limits=EngineLimits(8, 1_024, 256),
        prefill=27_220_480,
        decode=9_022_976,
        extend=26_889_216,
        host=0,
    ),
    "small-4": Build(
        model=SMALL,
        limits=EngineLimits(4, 2_048, 512),
        prefill=0,
        decode=0,
        extend=35_353_600,
        host=403 * MIB,
    ),
    "wide-4": Build(
        model=WIDE,
        limits=EngineLimits(4, 2_048, 512),
        prefill=0,
        decode=0,
        extend=140_814_336,
        host=1_337 * MIB,
    ),
}
EACH = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


@EACH
def test_memory_of_a_run_is_about_what_the_builder_reported(build: Build) -> None:
    for estimate, reported in (
        (build.chunk.prefill_bytes, build.prefill),
        (build.step.decode_bytes, build.decode),
        (build.chunk.extend_bytes, build.extend),
    ):
        if reported:
            assert estimate == pytest.approx(reported, rel=TOLERANCE)


@EACH
def test_memory_of_a_build_is_about_what_it_took(build: Build) -> None:
    if build.host:
        estimate = build_bytes(build.model.weight_bytes, build.model.layers)
        assert estimate == pytest.approx(build.host, rel=TOLERANCE)
