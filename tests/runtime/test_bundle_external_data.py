"""Graphs whose external data points where it must not, wherever in the graph it hides."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import BundleError

PutFile = Callable[[str, bytes], None]
FLOAT = onnx.TensorProto.FLOAT

BAD_LOCATIONS = {
    "": "is empty",
    "/etc/passwd": "absolute",
    "../secret.bin": "'..'",
    "a/../../secret.bin": "'..'",
    "./weights.bin": "'.'",
    "a\\b": "backslash",
    "C:secret.bin": "drive letter",
    "a\0b": "portable",
    "a\nb": "portable",
    "weights.bin ": "portable",
    "*/_ORT_MEM_ADDR_/*": "portable",
    "sub/weights.bin": "bare file name",
    "bundle.json": "not in files",
}


def refusal(folder: Path, field: str) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were opened as files of the bundle, in order."""
    names: list[str] = []
    real = os.open

    def spy(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & os.O_DIRECTORY:
            names.append(os.fspath(path))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", spy)
    return names


def tensor(**entries: str) -> onnx.TensorProto:
    made = onnx.TensorProto(name="w", dims=[4, 4], data_type=FLOAT)
    made.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        made.external_data.add(key=key, value=value)
    return made


def dense(bad: onnx.TensorProto) -> onnx.ModelProto:
    return onnx.ModelProto(graph=onnx.GraphProto(initializer=[bad]))


def node_model(attribute: onnx.AttributeProto) -> onnx.ModelProto:
    node = onnx.NodeProto(op_type="If", attribute=[attribute])
    return onnx.ModelProto(graph=onnx.GraphProto(node=[node]))


def attribute(bad: onnx.TensorProto) -> onnx.ModelProto:
    return node_model(onnx.AttributeProto(name="value", t=bad))


def attribute_list(bad: onnx.TensorProto) -> onnx.ModelProto:
    good = onnx.TensorProto(dims=[1], data_type=FLOAT, raw_data=b"\0" * 4)
    return node_model(onnx.AttributeProto(name="values", tensors=[good, bad]))


def sparse(bad: onnx.TensorProto) -> onnx.ModelProto:
    made = onnx.SparseTensorProto(values=bad)
    return onnx.ModelProto(graph=onnx.GraphProto(sparse_initializer=[made]))


def sparse_indices(bad: onnx.TensorProto) -> onnx.ModelProto:
    made = onnx.SparseTensorProto(indices=bad)
    return node_model(onnx.AttributeProto(name="value", sparse_tensor=made))


def subgraph(bad: onnx.TensorProto) -> onnx.ModelProto:
    inner = attribute(bad).graph
    return node_model(onnx.AttributeProto(name="then_branch", g=inner))


def subgraph_list(bad: onnx.TensorProto) -> onnx.ModelProto:
    return node_model(onnx.AttributeProto(name="branches", graphs=[dense(bad).graph]))


def function(bad: onnx.TensorProto) -> onnx.ModelProto:
    made = onnx.FunctionProto(name="f", node=subgraph(bad).graph.node)
    return onnx.ModelProto(functions=[made])


def function_default(bad: onnx.TensorProto) -> onnx.ModelProto:
    default = onnx.AttributeProto(name="value", t=bad)
    return onnx.ModelProto(functions=[onnx.FunctionProto(name="f", attribute_proto=[default])])


def training(bad: onnx.TensorProto) -> onnx.ModelProto:
    made = onnx.TrainingInfoProto(algorithm=dense(bad).graph)
    return onnx.ModelProto(training_info=[made])


PLACES = [
    dense,
    attribute,
    attribute_list,
    sparse,
    sparse_indices,
    subgraph,
    subgraph_list,
    function,
    function_default,
    training,
]
Place = Callable[[onnx.TensorProto], onnx.ModelProto]


@pytest.mark.parametrize("place", PLACES)
def test_good_external_data_is_accepted_everywhere(
    plain_bundle: Path, put_file: PutFile, place: Place
) -> None:
    good = tensor(location="weights.bin", offset="0", length="64", checksum="0" * 40)
    put_file("decode.onnx", place(good).SerializeToString())
    open_bundle(plain_bundle)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("../outside", "'..'"),
        ("/dev/zero", "absolute"),
        ("unlisted.bin", "not in files"),
        ("fifo", "not in files"),
        ("sub/weights.bin", "bare file name"),
        ("*/_ORT_MEM_ADDR_/*", "portable"),
    ],
)
def test_external_locations(
    plain_bundle: Path,
    put_file: PutFile,
    reads: list[str],
    place: Place,
    location: str,
    why: str,
) -> None:
    (plain_bundle.parent / "outside").write_bytes(b"\0" * 64)
    (plain_bundle / "unlisted.bin").write_bytes(b"\0" * 64)
    os.mkfifo(plain_bundle / "fifo")
    put_file("decode.onnx", place(tensor(location=location)).SerializeToString())
    assert why in refusal(plain_bundle, "graphs[1].file")
    assert not {"outside", "unlisted.bin", "fifo"} & {Path(name).name for name in reads}


@pytest.mark.parametrize("path", BAD_LOCATIONS)
def test_every_unsafe_location(plain_bundle: Path, put_file: PutFile, path: str) -> None:
    put_file("prefill.onnx", dense(tensor(location=path)).SerializeToString())
    assert BAD_LOCATIONS[path] in refusal(plain_bundle, "graphs[0].file")


@pytest.mark.parametrize("place", [dense, subgraph, function])
@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"offset": "-1"}, "offset '-1'"),
        ({"length": "-64"}, "length '-64'"),
        ({"offset": "1"}, "ends at byte 65"),
        ({"offset": "64", "length": "64"}, "ends at byte 128"),
        ({"offset": "9007199254740992"}, "which has 64"),
        ({"offset": "18446744073709551615"}, "offset '18446744073709551615'"),
        ({"offset": "9" * 400}, "offset '999"),
        ({"length": "63"}, "need 64"),
        ({"length": "65"}, "need 64"),
        ({"length": ""}, "length ''"),
        ({"offset": " 0"}, "offset ' 0'"),
        ({"offset": "+0"}, "offset '+0'"),
        ({"offset": "0x10"}, "offset '0x10'"),
        ({"offset": "1e3"}, "offset '1e3'"),
        ({"offset": "٣"}, "offset"),
        ({"basepath": "/"}, "'basepath' which is unknown"),
        ({"": "x"}, "'' which is unknown"),
    ],
)
def test_external_ranges_and_keys(
    plain_bundle: Path, put_file: PutFile, place: Place, entries: dict[str, str], why: str
) -> None:
    bad = tensor(location="weights.bin", **entries)
    put_file("prefill.onnx", place(bad).SerializeToString())
    assert why in refusal(plain_bundle, "graphs[0].file")


def bad_tensors() -> dict[str, tuple[onnx.TensorProto, str]]:
    nowhere, twice, wide, negative, huge, text = (tensor(location="weights.bin") for _ in range(6))
    del nowhere.external_data[:]
    twice.external_data.add(key="location", value="../outside")
    wide.dims[0] = 5
    negative.dims[:] = [-4, -4]
    huge.dims[:] = [2**40, 2**40]
    text.data_type = onnx.TensorProto.STRING
    return {
        "no location": (nowhere, "names no location"),
        "two locations": (twice, "'location' twice"),
        "shape past the end": (wide, "ends at byte 80"),
        "negative shape": (negative, "negative or absurd"),
        "overflowing shape": (huge, "larger than any file"),
        "strings": (text, "element type 8"),
    }


@pytest.mark.parametrize("case", bad_tensors())
def test_external_tensors_that_lie(plain_bundle: Path, put_file: PutFile, case: str) -> None:
    bad, why = bad_tensors()[case]
    put_file("decode.onnx", dense(bad).SerializeToString())
    assert why in refusal(plain_bundle, "graphs[1].file")


def test_external_entries_without_the_external_mark(plain_bundle: Path, put_file: PutFile) -> None:
    bad = tensor(location="../outside")
    bad.data_location = onnx.TensorProto.DEFAULT
    put_file("decode.onnx", dense(bad).SerializeToString())
    assert "'..'" in refusal(plain_bundle, "graphs[1].file")


def test_an_empty_graph_file(plain_bundle: Path, put_file: PutFile) -> None:
    put_file("decode.onnx", b"")
    assert "has 0 bytes" in refusal(plain_bundle, "graphs[1].file")


def test_a_truncated_graph(plain_bundle: Path, put_file: PutFile) -> None:
    whole = subgraph(tensor(location="weights.bin")).SerializeToString()
    for cut in range(1, len(whole)):
        put_file("decode.onnx", whole[:cut])
        assert "malformed" in refusal(plain_bundle, "graphs[1].file")
