"""native.json: what is written is what is read, and nothing else is."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.native_layout import Packing
from trtllm_lite.runtime.native_table import (
    GRAPHS,
    MAX_BYTES,
    VERSION,
    Copy,
    NativeTable,
    PackedWeight,
    from_json,
    graph_name,
    graph_names,
    to_json,
)

COUNTS = st.integers(0, MAX_BYTES)
PAIRS = st.tuples(COUNTS, COUNTS)


@st.composite
def weights(draw: st.DrawFn) -> PackedWeight:
    bits, gated = draw(st.sampled_from([4, 8])), draw(st.booleans())
    n = draw(st.integers(1, 10**6)) * (2 if gated else 1)
    block = draw(st.sampled_from([32, 64, 128]))
    packing = Packing(n, draw(st.integers(1, 10**6)), bits, block, gated)
    return PackedWeight(packing, draw(PAIRS), draw(PAIRS), draw(PAIRS) if bits == 4 else None)


TABLES = st.builds(
    NativeTable,
    st.integers(0, 9),
    COUNTS,
    st.lists(weights(), max_size=4).map(tuple),
    st.lists(st.builds(Copy, COUNTS, COUNTS, COUNTS), max_size=4).map(tuple),
    st.permutations(["float32", "float16", "int8"]).map(
        lambda kinds: tuple(kinds[: kinds.index("float32") + 1])
    ),
)


@given(TABLES)
def test_round_trip(table: NativeTable) -> None:
    assert from_json(json.dumps(to_json(table)).encode()) == table


def test_graphs_of_each_cache() -> None:
    """A table that names none has the graphs that a bundle always brings."""
    old = document()
    del old["kv_dtypes"]
    assert read(old).kv_dtypes == ("float32",)
    assert set(graph_names(("float32",))) == set(GRAPHS.values())
    assert graph_name("exact", "float16") == "native-float16.onnx"
    assert set(graph_names(("int8", "float32"))) == {
        *GRAPHS.values(),
        "native-int8.onnx",
        "native-fast-int8.onnx",
    }


def document() -> dict[str, Any]:
    """A good table with a weight of each kind."""
    table = NativeTable(
        VERSION,
        1 << 16,
        (
            PackedWeight(Packing(8, 64, 8, 64), (0, 0), (512, 2048), None),
            PackedWeight(Packing(8, 64, 4, 32, True), (600, 4096), (900, 5120), (1000, 6144)),
        ),
        (Copy(1024, 8192, 64),),
    )
    made: dict[str, Any] = json.loads(json.dumps(to_json(table)))
    return made


def read(found: object) -> NativeTable:
    return from_json(json.dumps(found).encode())


Change = Callable[[dict[str, Any]], object]


def put(path: str, value: object) -> Change:
    """Sets what stands at a path like weights.0.codes."""

    def change(found: Any) -> None:
        *way, last = path.split(".")
        for key in way:
            found = found[int(key) if isinstance(found, list) else key]
        found[int(last) if isinstance(found, list) else last] = value

    return change


def without(path: str) -> Change:
    def change(found: Any) -> None:
        *way, last = path.split(".")
        for key in way:
            found = found[int(key) if isinstance(found, list) else key]
        del found[last]

    return change


REQUIRED = [
    "format",
    "version",
    "size",
    "weights",
    "copies",
    "copies.0.source",
    "copies.0.target",
    "copies.0.length",
    *(f"weights.0.{name}" for name in ("packing", "codes", "scale", "zero")),
    *(f"weights.0.packing.{name}" for name in ("n", "k", "bits", "block", "gated")),
]
NUMBERS = [
    path
    for path in REQUIRED
    if path.rsplit(".")[-1]
    in ("version", "size", "source", "target", "length", "n", "k", "bits", "block")
]
PLACES = ["weights.0.codes", "weights.0.scale", "weights.1.zero"]


def refusal(found: object) -> str:
    with pytest.raises(BundleError) as caught:
        read(found)
    assert caught.value.field == "native.json"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_document_is_good() -> None:
    assert len(read(document()).weights) == 2


@pytest.mark.parametrize("path", REQUIRED)
def test_everything_is_required(path: str) -> None:
    found = document()
    without(path)(found)
    assert f"no '{path.rsplit('.')[-1]}'" in refusal(found)


@pytest.mark.parametrize("path", NUMBERS)
@pytest.mark.parametrize("value", [-1, 2**48 + 1, 1.0, "1", None, True, [1], {}])
def test_numbers_are_bounded(path: str, value: object) -> None:
    found = document()
    put(path, value)(found)
    assert "is not a number" in refusal(found)


@pytest.mark.parametrize("path", ["n", "k", "bits", "block"])
def test_sizes_are_positive(path: str) -> None:
    found = document()
    put(f"weights.0.packing.{path}", 0)(found)
    assert "0 is not a number from 1" in refusal(found)


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("value", [None, 3, "ab", [1], [1, 2, 3], [1, -2], [1, None], {"0": 1}])
def test_places_are_pairs(path: str, value: object) -> None:
    found = document()
    put(path, value)(found)
    assert "is not a" in refusal(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("format", "trtllm-lite"), "format is 'trtllm-lite'"),
        (put("format", None), "format is None"),
        (put("weights", {}), "is not a list"),
        (put("weights", ""), "is not a list"),
        (put("copies", None), "is not a list"),
        (put("weights.0", [1]), "is not an object"),
        (put("copies.0", [1, 2, 3]), "is not an object"),
        (put("weights.0.packing", None), "is not an object"),
        (put("weights.0.packing.bits", 2), "a weight of 2 bits"),
        (put("weights.0.packing.block", 16), "in blocks of 16"),
        (put("weights.0.packing.gated", 1), "gated is 1"),
        (put("weights.1.packing.n", 7), "gated is True of a weight with 7 rows"),
        (put("kv_dtypes", None), "is not a list"),
        (put("kv_dtypes", []), "kv_dtypes is []"),
        (put("kv_dtypes", ["float16"]), "kv_dtypes is"),
        (put("kv_dtypes", ["float32", "bfloat16"]), "kv_dtypes is"),
        (put("kv_dtypes", ["float32", "float32"]), "kv_dtypes is"),
        (put("kv_dtypes", ["float32", ["int8"]]), "kv_dtypes is"),
        (put("weights.0.zero", [0, 0]), "zero points of a weight of 8 bits"),
    ],
)
def test_what_makes_no_sense(change: Change, said: str) -> None:
    found = document()
    change(found)
    assert said in refusal(found)


@pytest.mark.parametrize("root", [None, [], 3, "text", True])
def test_roots_that_are_no_object(root: object) -> None:
    assert "is not an object" in refusal(root)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"{", b'{"a": 1, "a": 1}', b"[" * 100_000, b'{"size": 1e999}', b"{}{}"],
    ids=range(7),
)
def test_what_is_not_json(data: bytes) -> None:
    with pytest.raises(BundleError, match=r"native\.json: is not a table of native weights"):
        from_json(data)
