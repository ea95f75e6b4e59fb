"""Weights of several graphs in one file: every tensor keeps its bytes, equal ones lie once."""

import io
import itertools
import mmap
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from trtllm_lite.runtime.protobuf import WireError
from trtllm_lite.runtime.shared_initializers import LINE, PAGE, SharedData, moved_into

blocks = st.binary(min_size=1, max_size=6) | st.sampled_from([b"\1" * PAGE, b"\2" * (PAGE + 1)])
tensors = st.lists(st.tuples(blocks, st.lists(st.lists(blocks, min_size=1, max_size=3))))


def external(name: str, data: bytes, offset: int, packed: list[str]) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.UINT8, dims=[len(data)])
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": "old.data", "offset": str(offset), "length": str(len(data))}
    entries |= {f"prepacked_{i}": text for i, text in enumerate(packed)}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def save(
    given: list[tuple[bytes, list[list[bytes]]]], *, nested: bool = False
) -> tuple[onnx.ModelProto, bytes]:
    """A model with these tensors and their packed forms, as ONNX Runtime writes them; with
    `nested` the tensors lie in the subgraph of an If."""
    data, made = bytearray(b"-" * 3), []
    for i, (block, packed) in enumerate(given):
        offset = len(data)
        data += block
        texts = []
        for j, blobs in enumerate(packed):
            parts = []
            for blob in blobs:
                parts.append(f"{len(data)};{len(blob)};0")
                data += blob
            texts.append("|".join([f"key+{i}.{j}", *parts]))
        made.append(external(f"w{i}", block, offset, texts))
    made.append(TensorProto(name="small", data_type=TensorProto.FLOAT, dims=[1], float_data=[2.5]))
    inner = helper.make_graph([], "inner", [], [], initializer=made)
    if nested:
        node = helper.make_node("If", ["c"], ["y"], then_branch=inner, alpha=0.5, ints=[1, 2])
        inner = helper.make_graph([node], "outer", [], [])
    model = helper.make_model(inner, producer_name="x", doc_string="y" * 200)
    return model, bytes(data)


def all_tensors(graph: onnx.GraphProto) -> list[TensorProto]:
    below = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [*graph.initializer, *itertools.chain.from_iterable(map(all_tensors, below))]


def read(tensor: TensorProto, data: bytes) -> list[tuple[str, bytes]]:
    """The bytes that a tensor's entries name, and those of its packed forms, by key."""
    entries = {e.key: e.value for e in tensor.external_data}
    if not entries:
        return []
    offset = int(entries["offset"])
    found = [(entries["location"], data[offset : offset + int(entries["length"])])]
    for key, value in sorted(entries.items()):
        if key.startswith("prepacked"):
            name, *blobs = value.split("|")
            for blob in blobs:
                start, length, _ = blob.split(";")
                found.append((name, data[int(start) : int(start) + int(length)]))
    return found


def without_entries(model: onnx.ModelProto) -> bytes:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in all_tensors(copy.graph):
        del tensor.external_data[:]
    return bytes(copy.SerializeToString(deterministic=True))


@settings(deadline=None, max_examples=60)
@given(st.lists(tensors, min_size=1, max_size=3), st.booleans())
def test_every_tensor_keeps_its_bytes_and_every_block_lies_once(
    models: list[list[tuple[bytes, list[list[bytes]]]]], nested: bool
) -> None:
    file = io.BytesIO()
    shared = SharedData(file)
    saved = [save(given, nested=nested) for given in models]
    moved = [moved_into(shared, m.SerializeToString(), d, "new.data") for m, d in saved]
    data = file.getvalue()
    assert shared.size == len(data)
    distinct = set()
    for (model, old), new in zip(saved, moved, strict=True):
        parsed = onnx.ModelProto.FromString(new)
        assert without_entries(parsed) == without_entries(model)
        for a, b in zip(all_tensors(model.graph), all_tensors(parsed.graph), strict=True):
            expected, found = read(a, old), read(b, data)
            assert [x for _, x in found] == [x for _, x in expected]
            assert [n for n, _ in found[1:]] == [n for n, _ in expected[1:]]
            assert all(name == "new.data" for name, _ in found[:1])
            distinct |= {x for _, x in found}
    padding = len(distinct) * max(PAGE, LINE)
    assert sum(map(len, distinct)) <= len(data) <= sum(map(len, distinct)) + padding


def test_large_blocks_begin_on_pages_and_small_ones_on_cache_lines(tmp_path: Path) -> None:
    model, old = save([(b"a", []), (b"b" * PAGE, []), (b"c", [])])
    (tmp_path / "old").write_bytes(old)
    file = io.BytesIO()
    with (tmp_path / "old").open("rb") as f, mmap.mmap(f.fileno(), 0, access=1) as pages:
        new = moved_into(SharedData(file), model.SerializeToString(), pages, "new.data")
    entries = [
        {e.key: e.value for e in t.external_data}
        for t in onnx.ModelProto.FromString(new).graph.initializer[:3]
    ]
    assert [int(e["offset"]) for e in entries] == [0, PAGE, 2 * PAGE]
    assert LINE < PAGE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", "99999"),
        ("length", "99999"),
        ("prepacked_0", "key|0;1"),
        ("prepacked_0", "key|0;99999;0"),
        ("prepacked_0", "key"),
        ("colour", "red"),
    ],
)
def test_entries_that_name_no_bytes_are_refused(key: str, value: str) -> None:
    model, old = save([(b"abcd", [])])
    tensor = model.graph.initializer[0]
    kept = {e.key: e.value for e in tensor.external_data} | {key: value}
    del tensor.external_data[:]
    for name, text in kept.items():
        tensor.external_data.add(key=name, value=text)
    with pytest.raises(WireError):
        moved_into(SharedData(io.BytesIO()), model.SerializeToString(), old, "new.data")


def test_bytes_that_are_no_model_are_refused() -> None:
    for data in (b"\x3a\xff", b"\x0f" * 8):
        with pytest.raises(WireError):
            moved_into(SharedData(io.BytesIO()), data, b"x", "new.data")
