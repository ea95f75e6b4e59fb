"""Prepared weights as arrays over one mapping of their file."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import external_data_helper, numpy_helper

from trtllm_lite.runtime import mapped_weights
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.mapped_weights import map_weights, rewrite

KINDS = (np.float32, np.uint8, np.int8, np.uint16, np.int32, np.int64, np.float16)
FRESH = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write_graph(folder: Path, tensors: list[Any], *, inside: int = 0) -> Path:
    """A graph whose tensors lie in native.bin, after `inside` of them that lie in the graph."""
    protos = [numpy_helper.from_array(a, f"w{i}") for i, a in enumerate(tensors)]
    data = bytearray(5)
    for proto in protos[inside:]:
        external_data_helper.set_external_data(
            proto, "native.bin", offset=len(data), length=len(proto.raw_data)
        )
        data += proto.raw_data + bytes(3)
        proto.ClearField("raw_data")
        proto.data_location = onnx.TensorProto.EXTERNAL
    (folder / "native.bin").write_bytes(data)
    path = folder / "graph.onnx"
    model = onnx.ModelProto(graph=onnx.GraphProto(initializer=protos))
    path.write_bytes(model.SerializeToString())
    return path


@FRESH
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 4), max_size=3)), max_size=5)
)
def test_the_arrays_are_those_that_onnx_reads(
    tmp_path: Path, wanted: list[tuple[Any, list[int]]]
) -> None:
    rng = np.random.default_rng(len(wanted))
    tensors = [rng.integers(0, 100, dims).astype(kind) for kind, dims in wanted]
    path = write_graph(tmp_path, tensors, inside=min(1, len(tensors)))
    read = onnx.load(path)
    arrays = map_weights(path, tmp_path / "native.bin")
    assert list(arrays) == [t.name for t in read.graph.initializer][1:]
    for tensor in read.graph.initializer[1:]:
        expected = numpy_helper.to_array(tensor)
        assert arrays[tensor.name].dtype == expected.dtype
        assert arrays[tensor.name].shape == expected.shape
        assert np.array_equal(arrays[tensor.name], expected)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_all_arrays_share_one_mapping_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_graph(tmp_path, [np.ones(5000, np.float32), np.ones(5000, np.uint8)])
    arrays = list(map_weights(path, tmp_path / "native.bin").values())
    memory = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    assert sum(str(tmp_path / "native.bin") in line for line in memory) == 1
    assert not any(array.flags.writeable for array in arrays)


def test_a_graph_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = write_graph(tmp_path, [np.ones(50, np.float32)])
    (tmp_path / "native.bin").write_bytes(bytes(100))
    with pytest.raises(BundleError, match=r"does not fit native\.bin"):
        map_weights(path, tmp_path / "native.bin")


def test_a_type_that_our_graphs_do_not_have_is_refused(tmp_path: Path) -> None:
    path = write_graph(tmp_path, [np.ones(50, np.float64)])
    with pytest.raises(BundleError, match=r"does not fit native\.bin: 11"):
        map_weights(path, tmp_path / "native.bin")


def test_a_graph_of_another_file_gives_nothing(tmp_path: Path) -> None:
    path = write_graph(tmp_path, [np.ones(50, np.float32)])
    (tmp_path / "other.bin").write_bytes(b"")
    assert map_weights(path, tmp_path / "other.bin") == {}


@FRESH
@given(data=st.binary(max_size=40))
def test_a_copy_is_the_same_whatever_the_block(tmp_path: Path, data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_weights, "BLOCK", 7)
        (tmp_path / "a").write_bytes(data)
        rewrite(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
