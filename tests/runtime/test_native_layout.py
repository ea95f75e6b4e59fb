"""The packed layout, element by element against its definition in runtime/kernels/linear.h."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.native_layout import PANEL, Packing
from trtllm_lite.runtime.short_float import decoded, rounded

Array = npt.NDArray[Any]


def source(p: Packing, seed: int) -> tuple[Array, Array, Array | None]:
    """A weight as weights.bin has it."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (p.n, p.source_row_bytes)).astype(np.uint8)
    scale = rounded(rng.uniform(0.1, 1, (p.n, p.blocks)))
    zero = rng.integers(0, 256, (p.n, p.source_zero_bytes)).astype(np.uint8)
    return codes, scale, zero if p.bits == 4 else None


def places(p: Packing) -> Iterator[tuple[int, int, int]]:
    """(panel, lane, row of the weight) for every row: panels of 32 rows, or of 16 gates and then
    the 16 rows that they gate."""
    for row in range(p.n):
        if not p.gated:
            yield row // 32, row % 32, row
            continue
        part, output = divmod(row, p.n // 2)
        yield output // 16, 16 * part + output % 16, row


def nibble(data: Array, index: int) -> int:
    return int(data[index // 2]) >> 4 * (index % 2) & 15


def packed_code(p: Packing, panel: Array, lane: int, i: int) -> int:
    """What stands for input `i` of a lane: [k/4][32][4] bytes, or [k/8][32][4] of two groups."""
    group = i // 4
    if p.bits == 8:
        return int(panel[group * 128 + lane * 4 + i % 4])
    both = int(panel[group // 2 * 128 + lane * 4 + i % 4])
    return both >> 4 if group % 2 else both & 15


def packed_zero(zeros: Array, lane: int) -> int:
    """Of one block: byte i holds features i and i + 16, the first in its low half."""
    return int(zeros[lane % 16]) >> 4 * (lane // 16) & 15


def packed(p: Packing, data: tuple[Array, Array, Array | None], panels: int = 64) -> list[Array]:
    pieces = list(p.packed(*data, panels=panels))
    parts = range(3 if p.bits == 4 else 2)
    return [np.concatenate([piece[i] for piece in pieces]) for i in parts]


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    gated = draw(st.booleans())
    n = draw(st.integers(1, 35)) * 2 if gated else draw(st.integers(1, 70))
    block = draw(st.sampled_from([32, 64, 128]))
    return Packing(n, draw(st.integers(1, 150)), draw(st.sampled_from([4, 8])), block, gated)


@settings(max_examples=25)
@given(packings(), st.integers(0, 99))
@example(Packing(64, 128, 8, 64), 0)
@example(Packing(65, 65, 4, 32), 0)
@example(Packing(34, 33, 4, 64, gated=True), 0)
@example(Packing(32, 64, 8, 32, gated=True), 0)
def test_every_element_is_in_its_place(p: Packing, seed: int) -> None:
    data = source(p, seed)
    codes, scale, zero = data
    made = packed(p, data)
    assert [m.dtype for m in made] == [np.uint8, np.uint16, np.uint8][: len(made)]
    assert [m.shape for m in made] == [p.codes_shape, p.scale_shape, p.zero_shape][: len(made)]
    scales = decoded(made[1])
    taken = np.zeros(p.scale_shape, bool)
    for panel, lane, row in places(p):
        for i in range(p.blocks * p.block):
            stored = int(codes[row, i]) if p.bits == 8 else nibble(codes[row], i)
            assert packed_code(p, made[0][panel], lane, i) == stored
        for b in range(p.blocks):
            assert scales[panel, b, lane] == scale[row, b]
            taken[panel, b, lane] = True
            if zero is not None:
                assert packed_zero(made[2][panel, b], lane) == nibble(zero[row], b)
    for panel, b, lane in np.argwhere(~taken):
        middle = packed_zero(made[2][panel, b], lane) if p.bits == 4 else 128
        inputs = range(b * p.block, (b + 1) * p.block)
        assert {packed_code(p, made[0][panel], lane, i) for i in inputs} == {middle}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_the_same_in_pieces(bits: int, gated: bool) -> None:
    p = Packing(202, 70, bits, 32, gated)
    data = source(p, 1)
    assert p.panels == 7
    whole = packed(p, data)
    for panels in (1, 2, 7):
        for piece, part in zip(packed(p, data, panels), whole, strict=True):
            np.testing.assert_array_equal(piece, part)


@settings(max_examples=50)
@given(packings())
def test_sizes_are_those_of_the_definition(p: Packing) -> None:
    width = 16 if p.gated else PANEL
    outputs = p.n // 2 if p.gated else p.n
    assert (p.panels - 1) * width < outputs <= p.panels * width
    assert (p.blocks - 1) * p.block < p.k <= p.blocks * p.block
    assert p.codes_shape == (p.panels, 32 * p.blocks * p.block * p.bits // 8)


@pytest.mark.parametrize("bad", [-1.0, np.nan, 1 / 3, 1e9])
def test_scales_that_have_no_place_are_refused(bad: float) -> None:
    p = Packing(40, 70, 8, 32)
    codes, scale, _ = source(p, 2)
    scale[39, 2] = bad
    with pytest.raises(ValueError, match="a scale"):
        packed(p, (codes, scale, None))
