"""Spans of memory as sets of addresses, and huge pages as the system counts them."""

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.runtime.huge_pages import (
    HUGE,
    Span,
    anonymous_spans,
    collapse,
    give_back_free_memory,
    without,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def spans_of(cells: set[int]) -> list[Span]:
    """The maximal runs of a set of numbers."""
    starts = sorted(c for c in cells if c - 1 not in cells)
    stops = sorted(c + 1 for c in cells if c + 1 not in cells)
    return list(zip(starts, stops, strict=True))


cells = st.sets(st.integers(0, 30))


@given(cells, cells)
def test_without_is_a_difference_of_sets(some: set[int], taken: set[int]) -> None:
    left = without(spans_of(some), spans_of(taken))
    assert {c for a, b in left for c in range(a, b)} == some - taken
    assert left == sorted(left)


def mapped(blocks: int) -> tuple[mmap.mmap, int]:
    """A new private mapping of `blocks` whole huge blocks, and the address of the first."""
    pages = mmap.mmap(-1, (blocks + 1) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(pages, np.uint8).ctypes.data
    return pages, -(-address // HUGE) * HUGE


@linux
def test_new_private_memory_is_found() -> None:
    before = anonymous_spans()
    pages, start = mapped(2)
    new = without(anonymous_spans(), before)
    assert any(a <= start and start + 2 * HUGE <= b for a, b in new)
    assert before == sorted(before)
    pages.close()


def huge_bytes(start: int) -> int:
    """AnonHugePages of the mapping that holds the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            a, _, b = head.partition("-")
            inside = int(a, 16) <= start < int(b, 16)
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0


@linux
def test_used_blocks_become_huge_and_keep_their_content_and_unused_ones_stay_unused() -> None:
    pages, start = mapped(3)
    array = np.frombuffer(pages, np.uint8)
    first = start - array.ctypes.data
    values = np.arange(HUGE, dtype=np.uint32).astype(np.uint8)
    array[first : first + HUGE] = values
    array[first + HUGE] = 1  # one page of the second block; the third is untouched
    done = collapse([(start, start + 3 * HUGE)])
    assert done in (0, HUGE)  # 0 where the kernel has no such call, or no memory for it
    assert huge_bytes(start) == done
    np.testing.assert_array_equal(array[first : first + HUGE], values)


def test_blocks_that_are_not_whole_are_left_alone() -> None:
    assert collapse([]) == 0
    assert collapse([(HUGE + 1, 2 * HUGE + 1), (3 * HUGE, 3 * HUGE + 4096)]) == 0


def test_free_memory_can_be_given_back_anywhere() -> None:
    give_back_free_memory()
