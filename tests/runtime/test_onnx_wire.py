"""The reader of external data against onnx's own reader, on valid and on damaged bytes."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from importlib import import_module
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime import protobuf
from trtllm_lite.runtime.onnx_wire import (
    CHILDREN,
    ELEMENT_BITS,
    ExternalData,
    external_data,
    operators,
)
from trtllm_lite.runtime.protobuf import WireError

DecodeError: type[Exception] = import_module("google.protobuf.message").DecodeError
FLOAT = onnx.TensorProto.FLOAT
NO_SIZE = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)


def tensor(name: str, location: str, size: int, offset: int) -> onnx.TensorProto:
    made = onnx.TensorProto(name=name, dims=[size], data_type=FLOAT)
    made.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", 4 * size)):
        made.external_data.add(key=key, value=str(value))
    return made


def descend(message: Any) -> Iterator[onnx.TensorProto]:
    """Every TensorProto below a message, in the order of the bytes."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            items = [value] if hasattr(value, "ListFields") else value
            for item in items:
                yield from [item] if isinstance(item, onnx.TensorProto) else descend(item)


def test_the_table_covers_every_way_to_a_tensor() -> None:
    """From onnx's own descriptors: message fields that can lead to a TensorProto."""
    leads: dict[str, dict[int, tuple[str, bool]]] = {}
    waiting = [onnx.ModelProto.DESCRIPTOR]
    messages: dict[str, object] = {}
    while waiting:
        descriptor = waiting.pop()
        if descriptor.name in messages:
            continue
        messages[descriptor.name] = descriptor
        fields = [f for f in descriptor.fields if f.message_type is not None]
        waiting.extend(f.message_type for f in fields)
        leads[descriptor.name] = {
            f.number: (f.message_type.name, not f.is_repeated) for f in fields
        }
    reaching = {"TensorProto"}
    while (
        grown := {name for name, to in leads.items() if {x for x, _ in to.values()} & reaching}
        - reaching
    ):
        reaching |= grown
    expected = {
        name: {n: to for n, to in leads[name].items() if to[0] in reaching}
        for name in reaching - {"TensorProto"}
    }
    assert expected == CHILDREN


def test_element_sizes_are_those_of_onnx() -> None:
    types = [t for t in onnx.TensorProto.DataType.values() if t not in NO_SIZE]
    assert set(types) <= set(ELEMENT_BITS)
    for data_type in types:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(data_type)
        made = onnx.helper.make_tensor("t", data_type, [8], np.zeros(8, dtype))
        packed = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(made))
        assert ELEMENT_BITS[data_type] == len(packed.raw_data), data_type


names = st.text("abc", min_size=1, max_size=3)
tensors = st.builds(tensor, names, names, st.integers(0, 300), st.integers(0, 2**53)) | st.builds(
    lambda n: onnx.TensorProto(name=n, dims=[2], raw_data=b"x" * 200), names
)


def graphs(depth: int) -> st.SearchStrategy[onnx.GraphProto]:
    inner = st.nothing() if depth == 0 else graphs(depth - 1)
    sparse = st.builds(onnx.SparseTensorProto, values=tensors, indices=tensors)
    attributes = (
        st.builds(onnx.AttributeProto, name=names, t=tensors)
        | st.builds(onnx.AttributeProto, name=names, tensors=st.lists(tensors, max_size=2))
        | st.builds(onnx.AttributeProto, name=names, f=st.just(1.5), ints=st.just([1, 2**40]))
        | st.builds(onnx.AttributeProto, name=names, sparse_tensor=sparse)
    )
    if depth:
        attributes |= st.builds(onnx.AttributeProto, name=names, g=inner)
        attributes |= st.builds(onnx.AttributeProto, name=names, graphs=st.lists(inner, max_size=2))
    nodes = st.builds(onnx.NodeProto, op_type=names, attribute=st.lists(attributes, max_size=2))
    return st.builds(
        onnx.GraphProto,
        node=st.lists(nodes, max_size=2),
        initializer=st.lists(tensors, max_size=2),
        sparse_initializer=st.lists(sparse, max_size=1),
    )


def expected(model: onnx.ModelProto) -> list[ExternalData]:
    found = []
    for item in descend(model):
        if item.external_data:
            keys = {entry.key: entry.value for entry in item.external_data}
            size = 4 * item.dims[0]
            place = (keys["location"], int(keys["offset"]), size)
            found.append(ExternalData(item.name, *place, tuple(item.dims), item.data_type))
    return found


def by_value(items: list[ExternalData]) -> list[tuple[Any, ...]]:
    return sorted(astuple(x) for x in items)


@settings(max_examples=60, deadline=None)
@given(graphs(2))
def test_finds_what_onnx_finds(graph: onnx.GraphProto) -> None:
    model = onnx.ModelProto(ir_version=10, graph=graph)
    found = list(external_data(model.SerializeToString()))
    assert by_value(found) == by_value(expected(model))


@given(st.lists(st.text(max_size=8), max_size=5), graphs(1))
def test_operators_are_those_of_the_nodes(names: list[str], graph: onnx.GraphProto) -> None:
    del graph.node[:]
    graph.node.extend(onnx.NodeProto(op_type=name, name="n", domain="d") for name in names)
    model = onnx.ModelProto(ir_version=10, graph=graph)
    assert operators(model.SerializeToString()) == set(names) - {""} | ({""} & set(names))


@settings(max_examples=150, deadline=None)
@given(graphs(1), st.data())
def test_damaged_bytes_never_hide_a_tensor(graph: onnx.GraphProto, data: st.DataObject) -> None:
    """Whatever was done to the bytes: refused, or read as onnx itself reads them."""
    raw = bytearray(onnx.ModelProto(ir_version=10, graph=graph).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = list(external_data(bytes(raw)))
    except WireError:
        return
    try:
        model = onnx.ModelProto.FromString(bytes(raw))
    except DecodeError:
        return
    wanted = [item for item in descend(model) if item.external_data or item.data_location == 1]
    assert len(found) == len(wanted)


@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_empty(raw: bytes) -> None:
    with suppress(WireError):
        list(external_data(raw))


def wrapped(number: int, inner: bytes) -> bytes:
    """`inner` as a length-delimited field; its length takes three bytes."""
    size = len(inner)
    length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
    return bytes([number << 3 | 2]) + length + inner


def nested(levels: int) -> bytes:
    """`levels` subgraphs inside each other, around a tensor with external data."""
    graph = onnx.GraphProto(initializer=[tensor("w", "weights.bin", 1, 0)]).SerializeToString()
    for _ in range(levels):
        graph = wrapped(1, wrapped(5, wrapped(6, graph)))
    return wrapped(7, graph)


def test_nesting_is_bounded() -> None:
    assert len(list(external_data(nested(20)))) == 1
    assert len(expected(onnx.ModelProto.FromString(nested(20)))) == 1
    with pytest.raises(WireError, match="nested deeper than 100"):
        list(external_data(nested(34)))


def test_the_number_of_fields_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "MAX_FIELDS", 100)
    assert list(external_data(b"\x08\x01" * 100)) == []
    with pytest.raises(WireError, match="more than 100 fields"):
        list(external_data(b"\x08\x01" * 101))
    packed = onnx.ModelProto(graph=onnx.GraphProto(initializer=[onnx.TensorProto(dims=[1] * 200)]))
    with pytest.raises(WireError, match="more than 100 fields"):
        list(external_data(packed.SerializeToString()))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x3b\x3c", "wire type 3"),
        (b"\x3e", "wire type 6"),
        (b"\x02\x00", "field number 0"),
        (b"\x80" * 11, "more than 64 bits"),
        (b"\x08" + b"\xff" * 9 + b"\x7f", "more than 64 bits"),
        (b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "past the end"),
        (b"\x3a", "truncated"),
        (b"\x0d\x00\x00", "truncated"),
    ],
)
def test_malformed_protobuf(raw: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        list(external_data(raw))


def test_a_length_past_its_own_message_is_refused() -> None:
    """The inner length ends inside the file, but past the end of the graph around it."""
    with pytest.raises(WireError, match="past the end"):
        list(external_data(b"\x3a\x02\x2a\x03" + b"\0" * 20))


def test_an_entry_has_one_key_and_one_value() -> None:
    """Protobuf keeps the last of two values, so the first must not be what is checked."""
    entry = b"\x0a\x08location\x12\x04good\x12\x03bad"
    assert onnx.StringStringEntryProto.FromString(entry).value == "bad"
    raw = b"\x6a" + bytes([len(entry)]) + entry
    with pytest.raises(WireError, match="two keys or two values"):
        list(external_data(wrapped(7, wrapped(5, raw))))


def test_merged_messages_are_refused() -> None:
    """Protobuf merges the two graphs; checking them one by one would not see the merged tensor."""
    graph = onnx.ModelProto(graph=onnx.GraphProto(name="g")).SerializeToString()
    assert onnx.ModelProto.FromString(graph * 2).graph.name == "g"
    with pytest.raises(WireError, match="given twice"):
        list(external_data(graph * 2))


def test_fixed_width_fields_do_not_pass_for_dimensions() -> None:
    """A fixed64 with the number of `dims` is unknown to protobuf; read as a zero dimension it
    would make the tensor empty."""
    inner = tensor("w", "weights.bin", 100, 0)
    del inner.external_data[2]
    raw = b"\x09" + b"\0" * 8 + inner.SerializeToString()
    assert onnx.TensorProto.FromString(raw).dims == [100]
    model = wrapped(7, wrapped(5, raw))
    assert [item.length for item in external_data(model)] == [400]


def test_enumerations_are_read_as_32_bits() -> None:
    """Protobuf cuts an enum to 32 bits, so 2**32 + 1 is EXTERNAL."""
    raw = b"\x70\x81\x80\x80\x80\x10"
    assert onnx.TensorProto.FromString(raw).data_location == onnx.TensorProto.EXTERNAL
    with pytest.raises(WireError, match="element type 0"):
        list(external_data(wrapped(7, wrapped(5, raw))))
