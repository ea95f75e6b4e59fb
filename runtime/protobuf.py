"""Protobuf's wire format, as far as reading ONNX needs it: varints and length-delimited fields.

Fixed-width fields (floats) are jumped over. Groups are refused: ONNX has none.
https://protobuf.dev/programming-guides/encoding/
"""

import mmap
from collections.abc import Iterator
from typing import NamedTuple

MAX_FIELDS = 4_000_000
MAX_TEXT_BYTES = 4096
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
_WIRES = (_VARINT, _BYTES, *_FIXED)

Buffer = bytes | mmap.mmap


class WireError(ValueError):
    """The bytes are not a message that can be trusted. The text is one line."""


class Field(NamedTuple):
    """An integer field has its unsigned 64-bit `value`; the bytes of any other one are
    data[start:stop], and its value is None."""

    number: int
    value: int | None
    start: int
    stop: int


class Reader:
    """Reads protobuf fields from one buffer by position; nothing is copied but short texts."""

    def __init__(self, data: Buffer) -> None:
        self._data = data
        self._left = MAX_FIELDS

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """The integer and bytes fields of the message in data[start:stop], in order."""
        at = start
        while at < stop:
            self._left -= 1
            if self._left < 0:
                raise WireError(f"more than {MAX_FIELDS} fields")
            tag, at = self._varint(at, stop)
            number, wire = tag >> 3, tag & 7
            if not 1 <= number < 2**29 or wire not in _WIRES:
                text = f"malformed protobuf: field number {number}, wire type {wire}"
                raise WireError(text)
            if wire == _VARINT:
                value, at = self._varint(at, stop)
                yield Field(number, value, at, at)
                continue
            size, at = self._varint(at, stop) if wire == _BYTES else (_FIXED[wire], at)
            if size > stop - at:
                raise WireError("malformed protobuf: truncated, or a length past the end")
            if wire == _BYTES:
                yield Field(number, None, at, at + size)
            at += size

    def _varint(self, at: int, stop: int) -> tuple[int, int]:
        if at < stop and (byte := self._data[at]) < 0x80:
            return byte, at + 1
        value = 0
        for shift in range(0, 64, 7):
            if at >= stop:
                raise WireError("malformed protobuf: truncated")
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >= 2**64:
                    break
                return value, at
        raise WireError("malformed protobuf: a number of more than 64 bits")

    def numbers(self, field: Field) -> Iterator[int]:
        """The values of a repeated integer field, packed or not."""
        if field.value is not None:
            yield field.value
            return
        at = field.start
        while at < field.stop:
            self._left -= 1
            if self._left < 0:
                raise WireError(f"more than {MAX_FIELDS} fields")
            value, at = self._varint(at, field.stop)
            yield value

    def text(self, field: Field) -> str:
        if field.stop - field.start > MAX_TEXT_BYTES:
            raise WireError(f"a name or external data entry has over {MAX_TEXT_BYTES} bytes")
        try:
            return bytes(self._data[field.start : field.stop]).decode("utf-8")
        except UnicodeDecodeError:
            raise WireError("a name or external data entry is not UTF-8") from None
