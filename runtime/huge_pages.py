"""Memory of this process as the system sees it: huge pages for weights, free memory given back.

Weights that are read in every step miss the translation buffer in pages of 4 KB. Linux gathers
them into pages of 2 MB on request (MADV_COLLAPSE, Linux 6.1 and later:
https://man7.org/linux/man-pages/man2/madvise.2.html). Only memory that is private, anonymous and
already in use is touched, so that nothing grows and nothing shared is copied. Elsewhere than on
Linux all of this finds nothing to do.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HUGE = 2 * 2**20
_PAGE = 4096
_MADV_COLLAPSE = 25
_PROC = Path("/proc/self")

Span = tuple[int, int]
"""Addresses [start, stop)."""


def anonymous_spans() -> list[Span]:
    """The private writable memory of this process that belongs to no file, in order."""
    try:
        lines = (_PROC / "maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    spans = []
    for line in lines:
        addresses, flags, _, _, inode, *name = line.split(maxsplit=5)
        if flags == "rw-p" and inode == "0" and name[:1] in ([], ["[heap]"]):
            start, _, stop = addresses.partition("-")
            spans.append((int(start, 16), int(stop, 16)))
    return spans


def without(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """What of `spans` lies outside of `taken`; both sorted and without overlaps."""
    left = []
    for start, stop in spans:
        at = start
        for a, b in taken:
            if b <= at or a >= stop:
                continue
            if a > at:
                left.append((at, a))
            at = max(at, b)
        if at < stop:
            left.append((at, stop))
    return left


def collapse(spans: Sequence[Span]) -> int:
    """Gather the 2 MB blocks inside the spans that are mostly in use into huge pages; the bytes
    for which that worked."""
    blocks = [b for start, stop in spans for b in range(-(-start // HUGE) * HUGE, stop, HUGE)]
    blocks = [b for b in blocks if any(a <= b and b + HUGE <= z for a, z in spans)]
    madvise = _library_function("madvise")
    if madvise is None or not blocks:
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    used = [block for block in blocks if _mostly_used(block)]
    return HUGE * [madvise(block, HUGE, _MADV_COLLAPSE) for block in used].count(0)


def give_back_free_memory() -> None:
    """Return what the C library's allocator keeps of freed memory, where it can be asked to."""
    trim = _library_function("malloc_trim")
    if trim is not None:
        trim(0)


def _mostly_used(start: int) -> bool:
    """Whether at least half of the pages of the 2 MB block are present. Bit 63 of an entry:
    https://docs.kernel.org/admin-guide/mm/pagemap.html"""
    try:
        with (_PROC / "pagemap").open("rb", buffering=0) as file:
            file.seek(start // _PAGE * 8)
            data = file.read(HUGE // _PAGE * 8)
    except (OSError, ValueError):
        return False
    entries = np.frombuffer(data[: len(data) // 8 * 8], np.uint64)
    return int((entries >> np.uint64(63)).sum()) * 2 * _PAGE >= HUGE


def _library_function(name: str) -> "ctypes._FuncPointer | None":
    """A function of the C library that the process runs on; None where it has none of the name."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, TypeError, AttributeError):
        return None
    return function  # type: ignore[no-any-return]  # getattr on a library is Any
