"""The table of GPUs: memory, bandwidth and peak rates, each with its source (`gpus.toml`)."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from trtllm_lite.runtime.errors import UsageError

TABLE = "gpus.toml"
GIB = 2**30
ECC_SHARE = 1 / 16
NEAR, ALIKE = 3, 0.6
"""At most so many names are suggested, and how much of one has to be alike."""
# Words that are in a name as the driver gives it and not in ours.
_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|[^a-z0-9]")


@dataclass(frozen=True)
class Gpu:
    """One GPU. `sm`: compute capability times ten. `memory_gib`: as sold; `memory_bytes`: what a
    program sees of it. `bandwidth`: bytes a second. `flops`: dense multiplications and additions a
    second by type; a missing type is not computed in. `unified`: the memory is also the host's.
    `source` names where the figures stand."""

    name: str
    title: str
    sm: int
    memory_gib: float
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    source: str
    aliases: tuple[str, ...] = ()
    unified: bool = False


@cache
def read_gpus() -> tuple[Gpu, ...]:
    """All of the table, in its order."""
    text = files(__package__).joinpath(TABLE).read_text(encoding="utf-8")
    return tuple(_gpu(entry) for entry in tomllib.loads(text)["gpu"])


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, alias or title; letters' case, blanks and dashes do not count. Raises
    UsageError with the names that are nearest, and all of them."""
    wanted = _plain(name)
    for gpu in read_gpus():
        if wanted and wanted in map(_plain, _names(gpu)):
            return gpu
    near = _near(wanted)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    allowed = ", ".join((*(gpu.name for gpu in read_gpus()), "all", "current"))
    raise UsageError(f"--gpu: got {name!r}; {meant}allowed: {allowed}")


def _names(gpu: Gpu) -> tuple[str, ...]:
    return (gpu.name, gpu.title, *gpu.aliases)


def _near(wanted: str) -> list[str]:
    """Names of the GPUs that it may stand for, the nearest first."""
    of = {_plain(name): gpu.name for gpu in read_gpus() for name in _names(gpu)}
    begun = [plain for plain in of if wanted and plain.startswith(wanted)]
    spelled = get_close_matches(wanted, of, n=NEAR, cutoff=ALIKE)
    return list(dict.fromkeys(of[plain] for plain in (*begun, *spelled)))[:NEAR]


def _gpu(entry: Mapping[str, Any]) -> Gpu:
    left = 1 - ECC_SHARE if entry.get("ecc_in_band", False) else 1.0
    return Gpu(
        name=entry["name"],
        title=entry["title"],
        sm=entry["sm"],
        memory_gib=entry["memory_gib"],
        memory_bytes=int(entry["memory_gib"] * GIB * left),
        bandwidth=entry["bandwidth"] * 1e9,
        flops={kind: rate * 1e12 for kind, rate in entry["tflops"].items()},
        source=entry["source"],
        aliases=tuple(entry.get("aliases", ())),
        unified=entry.get("unified", False),
    )


def _plain(name: str) -> str:
    return _MAKERS.sub("", name.lower())
