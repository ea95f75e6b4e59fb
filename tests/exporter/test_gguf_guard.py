"""GGUF heads: gguf-py's own files are read alike, hostile ones are refused."""

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from trtllm_lite.exporter.checkpoint_guard import check_gguf
from trtllm_lite.exporter.gguf_guard import BLOCKS
from trtllm_lite.runtime.errors import CheckpointError

U8, U32, F32, STRING, ARRAY = 0, 4, 6, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def head(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def file(tmp_path: Path, raw: bytes, data: bytes = b"") -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw + b"\0" * (-len(raw) % 32) + data)
    return path


def refusal(path: Path) -> str:
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        check_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert str(caught.value).startswith(f"{path.name}: ")
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_the_block_table_is_that_of_gguf_py() -> None:
    known = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    assert known.items() <= BLOCKS.items()
    assert len(known) > 30


def write_real(path: Path, alignment: int | None) -> dict[str, Any]:
    """A file by gguf-py with every kind of value; returns its tensors."""
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((3, 5)).astype(np.float32)
    half = rng.standard_normal((2, 3, 4)).astype(np.float16)
    blocks = gguf.quantize(
        rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_int64("a.big", -(2**40))
    writer.add_string("a.text", "αβγ")
    writer.add_array("a.texts", ["x", "yy", ""])
    writer.add_array("a.numbers", [1, 2, 3, 4])
    writer.add_tensor("plain", plain)
    writer.add_tensor("half", half)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"plain": plain, "half": half, "blocks": blocks}


@pytest.mark.parametrize("alignment", [None, 64, 4096])
def test_reads_what_gguf_py_writes(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "model.gguf"
    arrays = write_real(path, alignment)
    header = check_gguf(path)
    expected = {"general.architecture": "llama", "a.count": 7, "a.float": 0.5, "a.bool": True}
    expected |= {"a.big": -(2**40), "a.text": "αβγ"}
    if alignment is not None:
        expected["general.alignment"] = alignment
    assert header.metadata == expected
    assert header.array_lengths == {"a.texts": 3, "a.numbers": 4}
    raw = path.read_bytes()
    assert [entry.name for entry in header.tensors] == list(arrays)
    for entry, read in zip(header.tensors, gguf.GGUFReader(path).tensors, strict=True):
        start, stop = header.data_start + entry.start, header.data_start + entry.stop
        assert start == read.data_offset
        assert entry.shape == tuple(read.shape)
        assert entry.type == read.tensor_type
        assert raw[start:stop] == arrays[entry.name].tobytes()


def test_every_cut_of_a_real_file_is_refused(tmp_path: Path) -> None:
    write_real(tmp_path / "whole.gguf", None)
    raw = (tmp_path / "whole.gguf").read_bytes()
    end = check_gguf(tmp_path / "whole.gguf").tensors[-1].stop
    last = check_gguf(tmp_path / "whole.gguf").data_start + end
    for cut in [*range(0, len(raw) // 2, 7), last - 1]:
        path = tmp_path / "cut.gguf"
        path.write_bytes(raw[:cut])
        with pytest.raises(CheckpointError):
            check_gguf(path)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGML" + bytes(32), "not a GGUF file"),
    "version 1": (head(0, 0, 1), "GGUF version 1"),
    "version 4": (head(0, 0, 4), "GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2**63 tensors": (head(2**63, 0), f"claims {2**63} tensors"),
    "2**63 keys": (head(0, 2**63), f"claims {2**63} keys"),
    "a million tensors": (head(2**20, 0), "truncated"),
    "65,536 keys": (head(0, 2**16), "truncated"),
    "key length": (head(0, 1) + struct.pack("<Q", 2**63) + bytes(32), "a key claims"),
    "key past the end": (head(0, 1) + struct.pack("<Q", 1000) + bytes(32), "truncated"),
    "key not UTF-8": (head(0, 1) + text(b"\xff") + bytes(32), "not UTF-8"),
    "key twice": (head(0, 2) + 2 * pair("a", U8, b"\0"), "key 'a' is there twice"),
    "value type": (head(0, 1) + pair("a", 13, bytes(8)), "unknown type 13"),
    "text length": (head(0, 1) + pair("a", STRING, struct.pack("<Q", 2**62)), "key 'a' claims"),
    "array length": (
        head(0, 1) + pair("a", ARRAY, struct.pack("<IQ", U32, 2**63)),
        "truncated",
    ),
    "array of texts": (
        head(0, 1) + pair("a", ARRAY, struct.pack("<IQ", STRING, 2**63)),
        f"claims {2**63} strings",
    ),
    "array of a million texts": (
        head(0, 1) + pair("a", ARRAY, struct.pack("<IQ", STRING, 2**20)),
        "truncated",
    ),
    "text inside an array": (
        head(0, 1) + pair("a", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63)),
        "truncated",
    ),
    "array of arrays": (
        head(0, 1) + pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(32)),
        "array of the unknown type 9",
    ),
    "alignment 0": (head(0, 1) + pair("general.alignment", U32, bytes(4)), "power of two"),
    "alignment 24": (
        head(0, 1) + pair("general.alignment", U32, struct.pack("<I", 24)),
        "power of two",
    ),
    "alignment text": (head(0, 1) + pair("general.alignment", STRING, text("32")), "power of two"),
    "dimensions": (head(1, 0) + text("t") + struct.pack("<I", 2**31) + bytes(32), "dimensions"),
    "tensor type": (head(1, 0) + info("t", [4], 999, 0), "unknown type 999"),
    "past the end": (head(1, 0) + info("t", [9], 0, 0), "ends at byte 36 of the data"),
    "offset past the end": (head(1, 0) + info("t", [8], 0, 2**63), "ends at byte"),
    "offset overflow": (head(1, 0) + info("t", [8], 0, 2**64 - 32), "ends at byte"),
    "shape overflow": (head(1, 0) + info("t", [2**32, 2**32], 0, 0), "ends at byte"),
    "misaligned": (head(1, 0) + info("t", [4], 0, 4), "not a multiple of 32"),
    "half a block": (head(1, 0) + info("t", [33], 8, 0), "not a multiple of its block of 32"),
    "same name": (head(2, 0) + info("t", [2], 0, 0) + info("t", [2], 0, 32), "there twice"),
    "overlap": (head(2, 0) + info("a", [8], 0, 0) + info("b", [4], 0, 0), "overlaps"),
    "name with newline": (head(1, 0) + info("a\nb", [4], 999, 0), "tensor 'a\\nb'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_heads(tmp_path: Path, case: str) -> None:
    raw, why = HOSTILE[case]
    assert why in refusal(file(tmp_path, raw, b"\0" * 32))


def test_a_sparse_file_does_not_make_counts_true(tmp_path: Path) -> None:
    """Many gigabytes of zeros behind a head that claims a million strings."""
    raw = head(0, 1) + pair("a", ARRAY, struct.pack("<IQ", STRING, 2**40))
    path = file(tmp_path, raw)
    os.truncate(path, 2**36)
    assert "strings; at most" in refusal(path)


def test_odd_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert "truncated: 4 bytes" in refusal(path)
    path.write_text("version https://git-lfs.invalid/spec/v1\n")
    assert "git lfs pull" in refusal(path)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in refusal(path)
