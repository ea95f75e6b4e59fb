"""The processor, its memory and the limits of this process."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.host import available_memory, instruction_set, physical_cores
from trtllm_lite.runtime.host_cache import user_cache_folder
from trtllm_lite.runtime.kernels import find_kernels

TELLING = (
    *(
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
        "avx512_bf16",
        "avx512vbmi",
    ),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""Extensions that decide which kernels run, of x86-64 and of Arm, as Linux names them."""


@dataclass(frozen=True)
class HostFacts:
    """Bytes are None where the system does not say. `kernels` is the native library's file name,
    empty where `kernels_reason` says why it is not used."""

    system: str
    processor: str
    cores: int
    instruction_sets: tuple[str, ...]
    memory_bytes: int | None
    available_bytes: int | None
    huge_pages: str
    cache_folder: str
    cache_problem: str
    open_files: int | None
    open_files_most: int | None
    kernels: str
    kernels_reason: str


def read_host(root: Path = Path("/")) -> HostFacts:
    """What this process finds around it. Changes nothing."""
    folder, problem = _cache()
    soft, hard = _open_files()
    kernels = find_kernels()
    sets = set(instruction_set(root).split())
    return HostFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(root),
        cores=physical_cores(root),
        instruction_sets=tuple(name for name in TELLING if name in sets),
        memory_bytes=_total_memory(root),
        available_bytes=available_memory(root),
        huge_pages=_huge_pages(root),
        cache_folder=folder,
        cache_problem=problem,
        open_files=soft,
        open_files_most=hard,
        kernels=kernels.library.name if kernels.library else "",
        kernels_reason=kernels.reason,
    )


def _processor(root: Path) -> str:
    for line in _lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def _total_memory(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        words = value.split()
        if name == "MemTotal" and words and words[0].isdigit():
            return int(words[0]) * 1024
    return None


def _huge_pages(root: Path) -> str:
    """always, madvise or never: the word in brackets of
    https://docs.kernel.org/admin-guide/mm/transhuge.html; empty where the system does not say."""
    for line in _lines(root / "sys/kernel/mm/transparent_hugepage/enabled"):
        for word in line.split():
            if word.startswith("[") and word.endswith("]"):
                return word[1:-1]
    return ""


def _cache() -> tuple[str, str]:
    """The user's cache folder and what is wrong with it."""
    folder = user_cache_folder()
    if folder is None:
        return "", "this user has no home folder"
    there = next((p for p in (folder, *folder.parents) if p.exists()), None)
    if there is None or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return str(folder), "cannot be written"
    return str(folder), ""


def _open_files() -> tuple[int | None, int | None]:
    """The soft and the hard limit; None without one."""
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return None, None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if x == resource.RLIM_INFINITY else x for x in limits)
    return soft, hard


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
