"""The data of a native graph, made from a bundle's weights file."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from trtllm_lite.runtime import native_weights
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.host_cache import host_cache
from trtllm_lite.runtime.manifest import FileEntry, Manifest
from trtllm_lite.runtime.manifest_io import write_manifest
from trtllm_lite.runtime.native_layout import Packing
from trtllm_lite.runtime.native_table import (
    DATA_NAME,
    GRAPHS,
    MAX_TABLE_BYTES,
    TABLE_NAME,
    VERSION,
    Copy,
    NativeTable,
    PackedWeight,
    to_json,
)
from trtllm_lite.runtime.native_weights import (
    NAME,
    has_native,
    native_preparer,
    read_table,
    write_data,
)
from trtllm_lite.runtime.progress import NoProgress
from trtllm_lite.runtime.short_float import rounded

Array = npt.NDArray[Any]

EIGHT = Packing(40, 70, 8, 32)
FOUR = Packing(36, 50, 4, 32, gated=True)


class Notes(NoProgress):
    """Keeps what was said, and how far it came."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.done: list[int] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    def advance(self, done: int, total: int, unit: str) -> None:
        assert unit == "bytes"
        assert done <= total
        self.done.append(done)


class Layout:
    """Two weights and a copied tensor: their bytes in a weights file, behind 64 others."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.file = bytearray(range(64))
        self.parts: dict[str, Array] = {}
        self.at: dict[str, int] = {}
        for name, p in (("eight", EIGHT), ("four", FOUR)):
            self._add(f"{name}.codes", rng.integers(0, 256, (p.n, p.source_row_bytes), np.uint8))
            self._add(f"{name}.scale", rounded(rng.random((p.n, p.blocks))))
        zero = rng.integers(0, 256, (FOUR.n, FOUR.source_zero_bytes), np.uint8)
        self._add("four.zero", zero)
        self._add("norm", rng.random(50, np.float32))

    def _add(self, name: str, values: Array) -> None:
        self.file += bytes(3)  # places need not be aligned
        self.at[name], self.parts[name] = len(self.file), values
        self.file += values.tobytes()

    @property
    def table(self) -> NativeTable:
        """The data file holds everything in another order."""
        eight = PackedWeight(
            EIGHT, (self.at["eight.codes"], 4096), (self.at["eight.scale"], 0), None
        )
        four = PackedWeight(
            FOUR,
            (self.at["four.codes"], 16384),
            (self.at["four.scale"], 20480),
            (self.at["four.zero"], 24576),
        )
        return NativeTable(VERSION, 28672, (four, eight), (Copy(self.at["norm"], 2048, 200),))

    def check(self, data: bytes) -> None:
        """Every part of the data file, and zeros between them."""
        rest = bytearray(data)

        def take(offset: int, wanted: Array) -> None:
            assert data[offset : offset + wanted.nbytes] == wanted.tobytes()
            rest[offset : offset + wanted.nbytes] = bytes(wanted.nbytes)

        take(2048, self.parts["norm"])
        for name, packing, places in (
            ("eight", EIGHT, (4096, 0)),
            ("four", FOUR, (16384, 20480, 24576)),
        ):
            zero = self.parts.get(f"{name}.zero")
            pieces = packing.packed(self.parts[f"{name}.codes"], self.parts[f"{name}.scale"], zero)
            made = [np.concatenate(p) for p in zip(*pieces, strict=True) if p[0] is not None]
            for offset, wanted in zip(places, made, strict=True):
                take(offset, wanted)
        assert not any(rest)


@pytest.fixture
def layout() -> Layout:
    return Layout()


Put = Callable[[str, bytes], Bundle]


@pytest.fixture
def put(plain_bundle: Path, plain_manifest: Manifest) -> Put:
    """Writes a file of the bundle, lists it, and opens the bundle."""
    listed = {f.path: f for f in plain_manifest.files}

    def put(name: str, data: bytes) -> Bundle:
        (plain_bundle / name).write_bytes(data)
        listed[name] = FileEntry(name, len(data), hashlib.sha256(data).hexdigest())
        write_manifest(plain_bundle, replace(plain_manifest, files=tuple(listed.values())))
        return open_bundle(plain_bundle)

    return put


def table_bytes(table: NativeTable) -> bytes:
    return json.dumps(to_json(table)).encode()


def graph(location: str, offset: int = 0, length: int = 64) -> bytes:
    """An ONNX file with one float32 tensor that lies elsewhere."""
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[length // 4], data_location=1)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return bytes(onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor])).SerializeToString())


@pytest.fixture
def native_bundle(put: Put, layout: Layout) -> Bundle:
    put("weights.bin", bytes(layout.file))
    put(TABLE_NAME, table_bytes(layout.table))
    put(GRAPHS["fast"], graph(DATA_NAME))
    return put(GRAPHS["exact"], graph(DATA_NAME))


def test_the_data_file(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(layout.file)
    notes = Notes()
    write_data(tmp_path / "weights.bin", tmp_path / DATA_NAME, layout.table, notes)
    layout.check((tmp_path / DATA_NAME).read_bytes())
    assert (tmp_path / DATA_NAME).stat().st_size == layout.table.size
    assert notes.done == sorted(notes.done)
    assert len(notes.done) == 2


def test_a_table_without_weights(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    table = NativeTable(VERSION, 100, (), (Copy(0, 0, 0),))
    write_data(tmp_path / "weights.bin", tmp_path / DATA_NAME, table, NoProgress())
    assert (tmp_path / DATA_NAME).read_bytes() == bytes(100)


def moved(table: NativeTable, index: int, **places: Any) -> NativeTable:
    weights = list(table.weights)
    weights[index] = replace(weights[index], **places)
    return replace(table, weights=tuple(weights))


OUTSIDE: list[tuple[Callable[[NativeTable], NativeTable], str]] = [
    (lambda t: replace(t, copies=(Copy(2**40, 0, 1),)), "points at byte 1099511627777 of"),
    (lambda t: replace(t, copies=(Copy(0, 28672, 1),)), "writes at byte 28673 of 28672"),
    (lambda t: replace(t, copies=(Copy(0, 0, 2**48),)), "points at byte"),
    (lambda t: moved(t, 0, codes=(2**48, 0)), "points at byte"),
    (lambda t: moved(t, 0, scale=(2**48, 0)), "points at byte"),
    (lambda t: moved(t, 0, zero=(2**48, 0)), "points at byte"),
    (lambda t: moved(t, 1, codes=(0, 28000)), "writes at byte"),
    (lambda t: moved(t, 1, scale=(t.weights[1].scale[0], 28671)), "writes at byte"),
    (lambda t: moved(t, 0, zero=(0, 2**48)), "writes at byte"),
    (lambda t: replace(t, size=20000), "writes at byte"),
]


@pytest.mark.parametrize(("change", "said"), OUTSIDE)
def test_places_outside_of_the_files(
    layout: Layout, tmp_path: Path, change: Callable[[NativeTable], NativeTable], said: str
) -> None:
    (tmp_path / "weights.bin").write_bytes(layout.file)
    with pytest.raises(BundleError, match=rf"native\.json: {said}") as caught:
        write_data(
            tmp_path / "weights.bin", tmp_path / DATA_NAME, change(layout.table), NoProgress()
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [(2**40, 64), (1, 2**40), (2**47, 2**47)])
def test_a_weight_larger_than_the_file_takes_no_memory(
    layout: Layout, tmp_path: Path, size: tuple[int, int]
) -> None:
    (tmp_path / "weights.bin").write_bytes(layout.file)
    huge = PackedWeight(Packing(*size, 8, 64), (0, 0), (0, 0), None)
    table = replace(layout.table, weights=(huge,))
    with pytest.raises(BundleError, match="points at byte"):
        write_data(tmp_path / "weights.bin", tmp_path / DATA_NAME, table, NoProgress())


def test_weights_that_end_where_the_file_ends(layout: Layout, tmp_path: Path) -> None:
    """The last byte counts: one less is too few."""
    (tmp_path / "weights.bin").write_bytes(layout.file[:-1])
    with pytest.raises(BundleError, match=f"points at byte {len(layout.file)} of"):
        write_data(tmp_path / "weights.bin", tmp_path / DATA_NAME, layout.table, NoProgress())


def test_scales_that_have_no_place(layout: Layout, tmp_path: Path) -> None:
    at = layout.at["eight.scale"]
    layout.file[at : at + 4] = np.float32(1 / 3).tobytes()
    (tmp_path / "weights.bin").write_bytes(layout.file)
    place = f"the weight at byte {layout.at['eight.codes']} cannot be packed: a scale has more"
    with pytest.raises(BundleError, match=rf"native\.json: {place}.*; export again"):
        write_data(tmp_path / "weights.bin", tmp_path / DATA_NAME, layout.table, NoProgress())


# In a bundle


def test_a_bundle_with_a_native_graph(native_bundle: Bundle, layout: Layout) -> None:
    assert has_native(native_bundle)
    assert read_table(native_bundle) == layout.table
    notes = Notes()
    folder = host_cache(native_bundle.folder).prepared(native_preparer(native_bundle), notes)
    assert folder is not None
    assert folder.name.startswith(f"{NAME}-")
    assert {p.name for p in folder.iterdir()} >= {*GRAPHS.values(), DATA_NAME}
    assert [(folder / name).read_bytes() for name in GRAPHS.values()] == 2 * [graph(DATA_NAME)]
    layout.check((folder / DATA_NAME).read_bytes())
    assert notes.texts == []


def test_all_files_are_needed(put: Put, layout: Layout) -> None:
    assert not has_native(put(TABLE_NAME, table_bytes(layout.table)))
    assert not has_native(put(GRAPHS["exact"], graph(DATA_NAME)))
    assert has_native(put(GRAPHS["fast"], graph(DATA_NAME)))


def refusal(bundle: Bundle) -> str:
    """The one note of a preparation that fails; it leaves nothing behind."""
    notes = Notes()
    cache = host_cache(bundle.folder, user_folder=bundle.folder.parent / "user")
    assert cache.prepared(native_preparer(bundle), notes) is None
    assert len(notes.texts) == 1
    assert "\n" not in notes.texts[0]
    for root in cache.roots:
        assert not root.exists() or not [p for p in root.iterdir() if p.is_dir()]
    return notes.texts[0]


@pytest.mark.usefixtures("native_bundle")
def test_tables_that_are_refused(put: Put, layout: Layout) -> None:
    assert "is not a table" in refusal(put(TABLE_NAME, b"{}"))
    for other in (VERSION - 1, VERSION + 1):
        table = table_bytes(replace(layout.table, version=other))
        said = f"version {other}; this runtime knows {VERSION}; export again"
        assert said in refusal(put(TABLE_NAME, table))
    small = replace(layout.table, size=20000)
    assert "writes at byte" in refusal(put(TABLE_NAME, table_bytes(small)))
    large = table_bytes(layout.table) + b" " * MAX_TABLE_BYTES
    assert "is larger than" in refusal(put(TABLE_NAME, large))


@pytest.mark.usefixtures("native_bundle")
@pytest.mark.parametrize("name", GRAPHS.values())
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (graph("../../weights.bin"), "native graph: tensor .* location that"),
        (graph("/etc/hosts"), "native graph: tensor .* location that"),
        (graph("weights.bin"), "'weights.bin', which is not in files"),
        (graph(DATA_NAME, 28672, 4), "ends at byte 28676 of 'native.bin'"),
        (b"", "native graph: has 0 bytes"),
        (b"\xff" * 9, "native graph: "),
    ],
    ids=range(6),
)
def test_graphs_that_reach_outside(put: Put, name: str, data: bytes, said: str) -> None:
    assert re.search(said, refusal(put(name, data)))


def test_the_data_file_is_written_anew_in_large_blocks(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written piece by piece stays in small pages; nothing of the pieces is left behind."""
    copied: list[tuple[str, str]] = []

    def rewrite(source: Path, target: Path) -> None:
        copied.append((source.name, target.name))
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(native_weights, "rewrite", rewrite)
    (tmp_path / "weights.bin").write_bytes(layout.file)
    write_data(tmp_path / "weights.bin", tmp_path / DATA_NAME, layout.table, NoProgress())
    assert copied == [("native.pieces", DATA_NAME)]
    assert {path.name for path in tmp_path.iterdir()} == {"weights.bin", DATA_NAME}
