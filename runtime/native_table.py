"""native.json: how the data of a bundle's native graph are made from its weights file.

Offsets are bytes; a pair is (in the weights file, in the data file).
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.kv_dtype import KVDtype
from trtllm_lite.runtime.native_layout import Packing
from trtllm_lite.runtime.strict_json import parse, shown

TABLE_NAME = "native.json"
Rounding = Literal["exact", "fast"]
"""How the activations of few tokens are rounded: as finely as 16 bits, or to 8 bits like those of
many, which is faster where many rows decode at once."""
GRAPHS: Mapping[Rounding, str] = {"exact": "native.onnx", "fast": "native-fast.onnx"}
PLAIN_CACHE: KVDtype = "float32"
"""What the graphs of `GRAPHS` have. A bundle always brings those."""
DATA_NAME = "native.bin"
FORMAT = "trtllm-lite-native"
VERSION = 2
"""Of the operators and of the packing: it rises when either would compute or lie otherwise."""
FEW_TOKENS = 24
"""The kernels compute runs of at most as many tokens a row in another way than longer ones, so that
results differ in what rounding leaves."""
MAX_BYTES = 2**48
MAX_TABLE_BYTES = 16 * 2**20

Pair = tuple[int, int]


@dataclass(frozen=True)
class Copy:
    """Bytes that are the same in both files."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight that is packed anew. `zero` only for 4 bits."""

    packing: Packing
    codes: Pair
    scale: Pair
    zero: Pair | None


@dataclass(frozen=True)
class NativeTable:
    """The whole table. `size` is that of the data file. `kv_dtypes`: the types of cache that there
    are graphs for, first the one that the bundle was made for."""

    version: int
    size: int
    weights: tuple[PackedWeight, ...]
    copies: tuple[Copy, ...]
    kv_dtypes: tuple[KVDtype, ...] = (PLAIN_CACHE,)


def graph_name(rounding: Rounding, kv_dtype: KVDtype) -> str:
    """The graph's file, in a bundle and where it is prepared."""
    name = GRAPHS[rounding]
    return name if kv_dtype == PLAIN_CACHE else name.replace(".onnx", f"-{kv_dtype}.onnx")


def graph_names(kv_dtypes: Iterable[KVDtype]) -> tuple[str, ...]:
    """The files of all graphs over these types of cache."""
    return tuple(graph_name(rounding, kind) for kind in kv_dtypes for rounding in GRAPHS)


def to_json(table: NativeTable) -> dict[str, Any]:
    """Plain data for native.json."""
    return {"format": FORMAT, **asdict(table)}


def from_json(data: bytes) -> NativeTable:
    """Raises BundleError for a table that is not one of ours."""
    try:
        root = parse(data)
        return _table(root)
    except KeyError as error:
        raise BundleError(TABLE_NAME, f"is not a table of native weights: no {error}") from error
    except ValueError as error:
        raise BundleError(TABLE_NAME, f"is not a table of native weights: {error}") from error


def _table(root: object) -> NativeTable:
    table = _object(root)
    if table["format"] != FORMAT:
        raise ValueError(f"format is {shown(table['format'])}")
    return NativeTable(
        version=_count(table["version"]),
        size=_count(table["size"]),
        weights=tuple(_weight(_object(w)) for w in _list(table["weights"])),
        copies=tuple(
            Copy(*(_count(_object(c)[key]) for key in ("source", "target", "length")))
            for c in _list(table["copies"])
        ),
        kv_dtypes=_kv_dtypes(table.get("kv_dtypes", [PLAIN_CACHE])),
    )


def _kv_dtypes(found: object) -> tuple[KVDtype, ...]:
    named = _list(found)
    known = tuple(kind for name in named for kind in get_args(KVDtype) if kind == name)
    if len(known) != len(named) or len(set(known)) != len(named) or PLAIN_CACHE not in known:
        raise ValueError(f"kv_dtypes is {shown(found)}")
    return known


def _weight(found: Mapping[str, Any]) -> PackedWeight:
    p = _object(found["packing"])
    n, k, bits, block = (_count(p[key], 1) for key in ("n", "k", "bits", "block"))
    if bits not in (4, 8) or block not in (32, 64, 128):
        raise ValueError(f"a weight of {bits} bits in blocks of {block}")
    gated, zero = p["gated"], found["zero"]
    if not isinstance(gated, bool) or (gated and n % 2):
        raise ValueError(f"gated is {shown(gated)} of a weight with {n} rows")
    if bits == 8 and zero is not None:
        raise ValueError("zero points of a weight of 8 bits")
    return PackedWeight(
        packing=Packing(n, k, bits, block, gated),
        codes=_pair(found["codes"]),
        scale=_pair(found["scale"]),
        zero=None if bits == 8 else _pair(zero),
    )


def _pair(found: object) -> Pair:
    if not isinstance(found, list) or len(found) != 2:
        raise ValueError(f"{shown(found)} is not a pair")
    return _count(found[0]), _count(found[1])


def _count(found: object, lowest: int = 0) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not lowest <= found <= MAX_BYTES:
        raise ValueError(f"{shown(found)} is not a number from {lowest}")
    return found


def _list(found: object) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError(f"{shown(found)} is not a list")
    return found


def _object(found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{shown(found)} is not an object")
    return found
