"""Tensors come out of the files in pieces, and are what the files hold."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trtllm_lite.exporter import weights
from trtllm_lite.exporter.calibration.scaling import Scaling
from trtllm_lite.exporter.weights import MappedSource, SafetensorsSource
from trtllm_lite.runtime.errors import CheckpointError, UnsupportedError

PIECE = 64
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def joined(source: SafetensorsSource, name: str) -> Any:
    pieces = list(source.pieces(name))
    assert all(piece.ndim == 1 and piece.nbytes <= PIECE for piece in pieces)
    return np.concatenate(pieces) if pieces else np.empty(0)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", PIECE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("around", [-1, 0, 1])
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_pieces_are_the_tensor(
    tmp_path: Path, dtype: torch.dtype, around: int, pieces: int
) -> None:
    count = max(0, pieces * PIECE // dtype.itemsize + around)
    before, wanted = tensor(5, dtype), tensor(count, dtype)
    save_file({"a": before, "b": wanted, "c": before.clone()}, tmp_path / "m.safetensors")
    source = SafetensorsSource([tmp_path / "m.safetensors"])
    assert source.shape("b") == (count,)
    got = joined(source, "b")
    assert np.array_equal(got.astype(np.float64), wanted.to(torch.float64).numpy())
    assert count == 0 or got.dtype.itemsize == dtype.itemsize


def test_shapes_and_order_of_a_matrix(tmp_path: Path) -> None:
    matrix = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    save_file({"m": matrix, "scalar": torch.tensor(3.0)}, tmp_path / "m.safetensors")
    source = SafetensorsSource([tmp_path / "m.safetensors"])
    assert source.names() == {"m", "scalar"}
    assert (source.shape("m"), source.shape("scalar")) == ((5, 7), ())
    assert joined(source, "m").tolist() == list(range(35))
    assert joined(source, "scalar").tolist() == [3.0]


def test_special_values_survive(tmp_path: Path) -> None:
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38])
    for dtype in (torch.float32, torch.bfloat16):
        save_file({"t": values.to(dtype)}, tmp_path / "m.safetensors")
        got = joined(SafetensorsSource([tmp_path / "m.safetensors"]), "t").astype(np.float32)
        want = values.to(dtype).float().numpy()
        assert got.tobytes() == want.tobytes()


def test_several_files(tmp_path: Path) -> None:
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    save_file({"a": torch.tensor([1.0])}, files[0])
    save_file({"b": torch.tensor([2.0])}, files[1])
    source = SafetensorsSource(files)
    assert source.names() == {"a", "b"}
    assert [joined(source, n).item() for n in ("a", "b")] == [1.0, 2.0]


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for file in files:
        save_file({"a": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match=r"a stands in 1\.safetensors and in 2\.safetensors"):
        SafetensorsSource(files)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool])
def test_other_types_are_refused_where_they_are_wanted(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"odd": torch.ones(2).to(dtype), "fine": torch.ones(2)}
    save_file(tensors, tmp_path / "m.safetensors")
    source = SafetensorsSource([tmp_path / "m.safetensors"])
    assert source.names() == {"odd", "fine"}
    assert joined(source, "fine").tolist() == [1.0, 1.0]
    for ask in (source.shape, lambda name: list(source.pieces(name))):
        with pytest.raises(UnsupportedError, match=r"weights of type \w+ \(tensor odd\)"):
            ask("odd")


def raw_file(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_a_truncated_file_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    file = raw_file(tmp_path / "m.safetensors", {"a": entry}, bytes(12))
    with pytest.raises(CheckpointError, match="need 16 bytes, the file has 12"):
        SafetensorsSource([file])


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}
    file = raw_file(tmp_path / "m.safetensors", {"a": entry}, bytes(128))
    source = SafetensorsSource([file])
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=r"m\.safetensors ends inside tensor a"):
        list(source.pieces("a"))


def test_a_mapped_source_renames(tmp_path: Path) -> None:
    save_file({"stored": torch.arange(3.0)}, tmp_path / "m.safetensors")
    source = MappedSource(SafetensorsSource([tmp_path / "m.safetensors"]), {"model": "stored"})
    assert source.shape("model") == (3,)
    assert np.concatenate(list(source.pieces("model"))).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(KeyError):
        source.shape("stored")


def test_parameters_are_scaled_inside_of_packed_weights(tmp_path: Path) -> None:
    """Every part by its own factors, and before the weight's offset is added."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1, 3)}
    save_file(tensors, tmp_path / "m.safetensors")
    source = SafetensorsSource([tmp_path / "m.safetensors"])
    mapped = MappedSource(
        source, {"a": "a", "b": "b"}, {"b+a": ("b", "a"), "a": ("a",)}, None, {"a": 0.5}
    )
    scaled = mapped.scaled({"a": Scaling(columns=np.array([1, 2, 4], np.float32))})
    want = (tensors["a"] * torch.tensor([1.0, 2.0, 4.0])).flatten().tolist()
    assert np.concatenate(list(scaled.pieces("b+a"))).tolist() == [1.0, 1.0, 1.0, *want]
    assert np.concatenate(list(scaled.pieces("a"))).tolist() == [w + 0.5 for w in want]
    assert scaled.shape("b+a") == mapped.shape("b+a") == (3, 3)
    assert np.concatenate(list(mapped.pieces("b+a"))).tolist() == [1, 1, 1, 0, 1, 2, 3, 4, 5]


def test_a_mapped_source_stacks_parts_and_adds_offsets(tmp_path: Path) -> None:
    parts = {"q": torch.arange(6.0).reshape(2, 3), "k": torch.arange(6.0, 9.0).reshape(1, 3)}
    save_file({**parts, "norm": torch.arange(3.0).to(torch.bfloat16)}, tmp_path / "m.safetensors")
    source = MappedSource(
        SafetensorsSource([tmp_path / "m.safetensors"]),
        {"q": "q", "k": "k", "norm": "norm"},
        {"q+k": ("q", "k"), "norm.plus_1": ("norm",)},
        {"table": np.ones((2, 2), np.float32)},
        {"norm.plus_1": 1.0},
    )
    assert [source.shape(name) for name in ("q+k", "k", "norm.plus_1")] == [(3, 3), (1, 3), (3,)]
    assert np.concatenate(list(source.pieces("q+k"))).tolist() == list(range(9))
    (added,) = source.pieces("norm.plus_1")
    assert added.dtype == np.float32
    assert added.tolist() == [1.0, 2.0, 3.0]
    assert next(source.pieces("norm")).astype(np.float32).tolist() == [0.0, 1.0, 2.0]
    assert source.shape("table") == (2, 2)
    assert next(source.pieces("table")).tolist() == [1.0] * 4
