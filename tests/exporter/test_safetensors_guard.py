"""Safetensors headers: the library's own files are read alike, hostile ones are refused."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from trtllm_lite.exporter.checkpoint_guard import check_safetensors
from trtllm_lite.runtime.errors import CheckpointError

DTYPES = [np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8]


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + raw + data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_safetensors(path)
    text = str(caught.value)
    assert text.startswith(f"{path.name}: ")
    assert text.isprintable()
    return text


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text("ab.0", min_size=1, max_size=5),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=4,
    )
)
def test_reads_what_the_library_writes(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[type, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("st") / "model.safetensors"
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        name: rng.integers(0, 100, shape).astype(dtype) for name, (dtype, shape) in shapes.items()
    }
    save_file(arrays, path, metadata={"format": "np"})
    header = check_safetensors(path)
    raw = path.read_bytes()
    assert header.metadata == {"format": "np"}
    assert {entry.name for entry in header.tensors} == set(arrays)
    for entry in header.tensors:
        data = raw[header.data_start + entry.start : header.data_start + entry.stop]
        assert entry.shape == arrays[entry.name].shape
        assert data == arrays[entry.name].tobytes()


def test_every_dtype_of_the_library_is_known(tmp_path: Path) -> None:
    """The library refuses an unknown dtype, so what it opens here it knows."""
    bits = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F8_E4M3": 8, "F8_E8M0": 8, "BF16": 16, "C64": 64}
    for dtype, size in bits.items():
        entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}
        path = write(tmp_path / "x.safetensors", {"t": entry}, b"\0" * size)
        with safe_open(path, framework="np") as file:
            assert file.keys() == ["t"]
        assert check_safetensors(path).tensors[0].stop == size


def tensor(start: int, stop: int, dtype: object = "U8", **other: object) -> dict[str, object]:
    shape = [stop - start]
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop], **other}


HOSTILE: dict[str, tuple[object, bytes, str]] = {
    "overlap": ({"a": tensor(0, 6), "b": tensor(4, 8)}, b"x" * 8, "overlaps"),
    "same bytes": ({"a": tensor(0, 8), "b": tensor(0, 8)}, b"x" * 8, "overlaps"),
    "gap": ({"a": tensor(0, 2), "b": tensor(4, 8)}, b"x" * 8, "gap"),
    "gap at the start": ({"a": tensor(2, 8)}, b"x" * 8, "gap"),
    "past the end": ({"a": tensor(0, 16)}, b"x" * 8, "need 16 bytes, the file has 8"),
    "unused tail": ({"a": tensor(0, 4)}, b"x" * 8, "need 4 bytes, the file has 8"),
    "unknown dtype": ({"a": tensor(0, 8, "U9")}, b"x" * 8, "unknown dtype 'U9'"),
    "dtype no text": ({"a": tensor(0, 8, dtype=["U8"])}, b"x" * 8, "unknown dtype"),
    "wrong size": (
        {"a": tensor(0, 8, "F32")},
        b"x" * 8,
        "has 64 bits of data; its dtype and shape need 256",
    ),
    "half a byte": (
        {"a": tensor(0, 1, "F4")},
        b"x",
        "has 8 bits of data; its dtype and shape need 4",
    ),
    "negative shape": ({"a": tensor(0, 1, shape=[-1, -1])}, b"x", "impossible shape"),
    "huge shape": ({"a": tensor(0, 1, shape=[2**40] * 2)}, b"x", f"need {2**83}"),
    "overflowing shape": ({"a": tensor(0, 1, shape=[10**19] * 16)}, b"x", "need 8000000"),
    "many dimensions": ({"a": tensor(0, 1, shape=[1] * 100_000)}, b"x", "impossible shape"),
    "boolean shape": ({"a": tensor(0, 1, shape=[True])}, b"x", "impossible shape"),
    "fraction": ({"a": tensor(0, 1, shape=[1.0])}, b"x", "impossible shape"),
    "backwards": ({"a": tensor(0, 1, data_offsets=[1, 0])}, b"x", "impossible data_offsets"),
    "negative": ({"a": tensor(0, 1, data_offsets=[-1, 0])}, b"x", "impossible data_offsets"),
    "three offsets": ({"a": tensor(0, 1, data_offsets=[0, 1, 2])}, b"x", "data_offsets"),
    "extra key": ({"a": tensor(0, 1, more=1)}, b"x", "must have dtype, shape and data_offsets"),
    "no object": ({"a": 1}, b"", "must have dtype, shape and data_offsets"),
    "newline in a name": ({"a\nb": 1}, b"", "tensor 'a\\nb'"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "duplicate": (b'{"a":{},"a":{}}', b"", "duplicate key 'a'"),
    "NaN": (b'{"a":NaN}', b"", "NaN"),
    "deep": (b'{"a":' * 100_000, b"", "nested too deeply"),
    "no JSON": (b"{nothing}", b"", "not JSON"),
    "not UTF-8": (b'{"\xff":1}', b"", "not UTF-8"),
    "array": (b"[]", b"", "not a safetensors file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    header, data, why = HOSTILE[case]
    assert why in refusal(write(tmp_path / "model.safetensors", header, data))


@pytest.mark.parametrize("length", [3, 2**31, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", b"{}", length=length)
    tracemalloc.start()
    text = refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"claims {length} bytes, the file has 10" in text
    assert peak < 2**20


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**30).to_bytes(8, "little") + b"{")
    os.truncate(path, 2**31)
    tracemalloc.start()
    text = refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "at most 33554432 are read" in text
    assert peak < 2**20


@pytest.mark.parametrize("data", [b"", b"\x02\0\0\0", b"\0" * 8, b"\x02\0\0\0\0\0\0\0"])
def test_short_files(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert "truncated or not safetensors" in refusal(path)


def test_odd_files(tmp_path: Path) -> None:
    pointer = tmp_path / "pointer.safetensors"
    pointer.write_text("version https://git-lfs.invalid/spec/v1\n")
    assert "git lfs pull" in refusal(pointer)
    os.mkfifo(tmp_path / "fifo.safetensors")
    assert "not a regular file" in refusal(tmp_path / "fifo.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    assert "not a regular file" in refusal(tmp_path / "zero.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert "not a regular file" in refusal(tmp_path / "folder.safetensors")
    assert "cannot be opened" in refusal(tmp_path / "missing.safetensors")


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    blob = write(tmp_path / "blob", {"a": tensor(0, 2)}, b"xy")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert check_safetensors(link) == check_safetensors(blob)
