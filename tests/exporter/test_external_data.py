"""The weights file: where tensors stand, what is written, and what does not fit."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lite.exporter.external_data import (
    ALIGNMENT,
    FLOAT_DTYPES,
    IR_DTYPES,
    NUMPY_DTYPES,
    bind,
    layout,
    plain,
    write_weights,
)
from trtllm_lite.exporter.quantize.quantizer import RoundToNearest
from trtllm_lite.exporter.weights import MappedSource
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.progress import NoProgress

Arrays = dict[str, Any]


class Memory:
    """A WeightSource of arrays, in pieces of three elements."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def names(self) -> frozenset[str]:
        return frozenset(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def pieces(self, name: str) -> Iterator[Any]:
        flat = self._arrays[name].reshape(-1)
        return (flat[i : i + 3] for i in range(0, len(flat), 3))


def values(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, ir.Value]:
    kind = ir.TensorType(IR_DTYPES[dtype])
    return {n: ir.Value(name=n, shape=ir.Shape(s), type=kind) for n, s in shapes.items()}


def written(folder: Path, arrays: Arrays, dtype: str) -> tuple[bytes, Any, Any]:
    """The file's bytes, its entry, and the places."""
    stored = plain(values({n: a.shape for n, a in arrays.items()}, dtype))
    places, size = layout(stored)
    source = MappedSource(Memory(arrays), {n: n for n in arrays})
    path = folder / "weights.bin"
    entry = write_weights(path, stored, source, RoundToNearest(), NoProgress())
    data = (folder / "weights.bin").read_bytes()
    assert len(data) == size
    return data, entry, places


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=4),
        st.lists(st.integers(0, 70), max_size=3).map(tuple),
        max_size=6,
    ),
    st.sampled_from(sorted(FLOAT_DTYPES)),
)
def test_layout(shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    places, size = layout(plain(values(shapes, dtype)))
    assert list(places) == list(shapes)
    end = 0
    for name, shape in shapes.items():
        assert places[name].offset == -(-end // ALIGNMENT) * ALIGNMENT
        count = 1
        for dim in shape:
            count *= dim
        assert places[name].length == count * (4 if dtype == "float32" else 2)
        end = places[name].offset + places[name].length
    assert size == end


@pytest.mark.parametrize("dtype", sorted(FLOAT_DTYPES))
def test_the_file_holds_every_tensor_in_its_place(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 5), "one": (), "long": (2000,), "z": (4,)}
    arrays = {n: np.asarray(rng.standard_normal(s), np.float32) for n, s in shapes.items()}
    data, entry, places = written(tmp_path, arrays, dtype)
    assert (entry.path, entry.size) == ("weights.bin", len(data))
    assert entry.sha256 == hashlib.sha256(data).hexdigest()
    rest = bytearray(data)
    for name, place in places.items():
        stop = place.offset + place.length
        expected = torch.from_numpy(arrays[name]).to(getattr(torch, dtype)).reshape(-1)
        assert data[place.offset : stop] == expected.view(torch.uint8).numpy().tobytes(), name
        rest[place.offset : stop] = bytes(place.length)
    assert not any(rest), "padding is zero"


def every_number(dtype: Any) -> Any:
    """All values of a 16-bit type but NaN."""
    bits = np.arange(2**16, dtype=np.uint16)
    infinity = np.array(np.inf, dtype).view(np.uint16)
    return bits[(bits & 0x7FFF) <= infinity].view(dtype)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_half_type_survives_float32_exactly(tmp_path: Path, name: str) -> None:
    """Widened and stored again, every number is the one it was."""
    numbers = every_number(NUMPY_DTYPES[name])
    data, _, _ = written(tmp_path, {"a": numbers.astype(np.float32)}, name)
    assert data == numbers.tobytes()
    data, _, _ = written(tmp_path, {"a": numbers}, "float32")
    assert data == numbers.astype(np.float32).tobytes()


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    numbers = every_number(ml_dtypes.bfloat16)
    data, _, _ = written(tmp_path, {"a": numbers}, "float32")
    upper = np.frombuffer(data, np.uint32) >> 16
    assert np.array_equal(upper.astype(np.uint16), numbers.view(np.uint16))
    assert not (np.frombuffer(data, np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize(
    ("dtype", "value", "action"),
    [
        ("float16", np.float32(65520), "--dtype bfloat16"),
        ("float16", np.float32(-1e6), "--dtype bfloat16"),
        ("float16", np.array(1e5, ml_dtypes.bfloat16), "--dtype bfloat16"),
        ("bfloat16", np.float32(3.4e38), "float32"),
        ("float32", np.float64(1e39), "scale the checkpoint"),
    ],
)
@pytest.mark.parametrize("beside", [1.0, np.inf, np.nan])
def test_values_that_do_not_fit(
    tmp_path: Path, dtype: str, value: Any, action: str, beside: float
) -> None:
    array = np.asarray([1.0, value, beside], np.asarray(value).dtype)
    with pytest.raises(UnsupportedError) as caught:
        written(tmp_path, {"layer.w": np.concatenate([np.ones(4, array.dtype), array])}, dtype)
    assert "in layer.w" in str(caught.value)
    assert action in str(caught.value)


@pytest.mark.parametrize("dtype", sorted(FLOAT_DTYPES))
def test_infinities_of_the_checkpoint_are_kept(tmp_path: Path, dtype: str) -> None:
    array = np.array([np.inf, -np.inf, 65504], np.float32)
    data, _, _ = written(tmp_path, {"a": array}, dtype)
    got = np.frombuffer(data, NUMPY_DTYPES[dtype]).astype(np.float32)
    assert got[:2].tolist() == [np.inf, -np.inf]


def test_progress_counts_the_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []

    class Recorder(NoProgress):
        def advance(self, done: int, total: int, unit: str) -> None:
            seen.append((done, total, unit))

    arrays = {"a": np.ones(10, np.float32), "b": np.ones(5, np.float32)}
    stored = plain(values({n: a.shape for n, a in arrays.items()}))
    source = MappedSource(Memory(arrays), {n: n for n in arrays})
    write_weights(tmp_path / "w", stored, source, RoundToNearest(), Recorder())
    size = layout(stored)[1]
    assert seen == sorted(seen)
    assert seen[-1] == (size, size, "bytes")


def test_bind_points_at_the_places(tmp_path: Path) -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 20]>'
        "agraph (float[2,3] x) => (float[2,3] y) { y = Add(x, w) }".replace("w)", "x)")
    )
    weight = ir.Value(name="w", shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.FLOAT))
    inside = ir.Value(name="k", const_value=ir.tensor([1.0], name="k"))
    model.graph.initializers["w"] = weight
    model.graph.initializers["k"] = inside
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"first": np.ones(3, np.float32), "w": array}
    written(tmp_path, arrays, "float32")
    stored = plain(values({n: a.shape for n, a in arrays.items()}))
    bind(model, stored, "weights.bin")
    bound = model.graph.initializers["w"].const_value
    assert isinstance(bound, ir.ExternalTensor)
    assert (bound.location, bound.offset, bound.length) == ("weights.bin", ALIGNMENT, 24)
    assert bound.dtype == IR_DTYPES["float32"]
    read = ir.ExternalTensor(
        "weights.bin",
        bound.offset,
        bound.length,
        bound.dtype,
        shape=bound.shape,
        name="w",
        base_dir=tmp_path,
    )
    assert np.array_equal(read.numpy(), array)
    assert model.graph.initializers["k"].const_value is inside.const_value
