"""The weight formats: what each stores for a weight [N, K], and how float rows become it.

| format | tensors | operator |
|---|---|---|
| int8_block32 (64) | q8 uint8 [N, K/32, 32], q8_scale f32 [N, K/32] | com.microsoft MatMulNBits |
| int4_block32 (64) | q4 uint8 [N, K/32, 16], q4_scale [N, K/32], q4_zero [N, K/64] | same |
| w8a8 | w8 int8 [K, N], w8_scale float32 [N] | com.microsoft MatMulIntegerToFloat |
| int8_dq128 (64, 32) | dq8 int8 [K, N], dq8_scale f32 [K/128, N] | DequantizeLinear, MatMul |
| int4_dq64 (32) | dq4 int4 [K, N], dq4_scale f32 [K/64, N] | same |
| fp8_dq128 (64, 32) | dqf8 float8e4m3fn [K, N], dqf8_scale f32 [K/128, N] | same |

Divisions round up; what stands after K is the zero point. Two 4-bit values share a byte, the first
in the low half. Sources: ONNX Runtime, docs/ContribOperators.md, the two operators.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtllm_lite.exporter.quantize.dequantized import DequantizedEncoder, Float8Encoder
from trtllm_lite.exporter.quantize.quantizer import Quantizer, RoundToNearest, per_channel

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
FLOAT8 = "float8e4m3fn"


@dataclass(frozen=True)
class Part:
    """One tensor of a format: the suffix of its name, its element type, its shape for [N, K].

    same_bytes_as: another part that it is a second view of; it takes no room of its own.
    """

    suffix: str
    dtype: str
    shape: Callable[[int, int], Shape]
    same_bytes_as: str | None = None


class Encoder(Protocol):
    """Takes a weight's rows in order. `add` gives the next bytes of the first part; `rest` gives
    the other parts, whole, when all rows were added."""

    def add(self, name: str, rows: Array) -> Array: ...

    def rest(self) -> dict[str, Array]: ...


@dataclass(frozen=True)
class Format:
    """A weight format. `bits` and `block` along K; block 0 is one scale a row. `dequantized`: K is
    a multiple of the block, and DequantizeLinear makes floats of it."""

    name: str
    bits: int
    block: int
    parts: tuple[Part, ...]
    dequantized: bool = False

    @property
    def is_block(self) -> bool:
        return self.block > 0

    def encoder(
        self, rows: int, columns: int, quantizer: Quantizer, scales: str = "float32"
    ) -> Encoder:
        """For one weight [rows, columns]; scales: the type that they are stored in. Only 4 bits
        ask the quantizer: rounding 8 bits to nearest loses nothing that shows."""
        asked = quantizer if self.bits < 8 else RoundToNearest()
        if self.dequantized:
            return self._dequantized_encoder((rows, columns), asked, scales)
        if not self.is_block:
            return _ChannelEncoder(rows, columns)
        return _BlockEncoder(self, asked, scales)

    def _dequantized_encoder(
        self, size: tuple[int, int], quantizer: Quantizer, scales: str
    ) -> Encoder:
        name = self.parts[0].suffix
        if self.parts[0].dtype == FLOAT8:
            return Float8Encoder(name, self.block, size, scales)
        return DequantizedEncoder(name, self.bits, self.block, size, quantizer, scales)


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def _int8_block(block: int) -> Format:
    parts = (
        Part("q8", "uint8", lambda n, k: (n, up(k, block), block)),
        Part("q8_scale", "float32", lambda n, k: (n, up(k, block))),
        Part("q8_rows", "uint8", lambda n, k: (n, up(k, block) * block), same_bytes_as="q8"),
    )
    return Format(f"int8_block{block}", 8, block, parts)


def _int4_block(block: int) -> Format:
    parts = (
        Part("q4", "uint8", lambda n, k: (n, up(k, block), block // 2)),
        Part("q4_scale", "float32", lambda n, k: (n, up(k, block))),
        Part("q4_zero", "uint8", lambda n, k: (n, up(up(k, block), 2))),
    )
    return Format(f"int4_block{block}", 4, block, parts)


def _dequantized(kind: str, bits: int, dtype: str, suffix: str, block: int) -> Format:
    parts = (
        Part(suffix, dtype, lambda n, k: (k, n)),
        Part(f"{suffix}_scale", "float32", lambda n, k: (k // block, n)),
    )
    return Format(f"{kind}_dq{block}", bits, block, parts, dequantized=True)


_CHANNEL_PARTS = (
    Part("w8", "int8", lambda n, k: (k, n)),
    Part("w8_scale", "float32", lambda n, k: (n,)),
)
INT8_BLOCK32 = _int8_block(32)
INT8_BLOCK64 = _int8_block(64)
W8A8 = Format("w8a8", 8, 0, _CHANNEL_PARTS)
INT4_BLOCK32 = _int4_block(32)
INT4_BLOCK64 = _int4_block(64)
INT8_DQ = tuple(_dequantized("int8", 8, "int8", "dq8", block) for block in (128, 64, 32))
INT4_DQ = tuple(_dequantized("int4", 4, "int4", "dq4", block) for block in (64, 32))
FP8_DQ = tuple(_dequantized("fp8", 8, FLOAT8, "dqf8", block) for block in (128, 64, 32))
NONE = "none"
FUSED: Mapping[str, Format] = {
    f.name: f for f in (INT8_BLOCK32, INT8_BLOCK64, W8A8, INT4_BLOCK32, INT4_BLOCK64)
}
"""Those that one operator multiplies by."""
FORMATS: Mapping[str, Format] = {
    **FUSED,
    **{f.name: f for f in (*INT8_DQ, *INT4_DQ, *FP8_DQ)},
}


class _BlockEncoder:
    def __init__(self, kind: Format, quantizer: Quantizer, stored: str) -> None:
        self._kind, self._quantizer, self._stored = kind, quantizer, stored
        self._scales: list[Array] = []
        self._zeros: list[Array] = []

    def add(self, name: str, rows: Array) -> Array:
        kind = self._kind
        made = self._quantizer.quantize(name, rows, kind.bits, kind.block, self._stored)
        self._scales.append(made.scale.astype(np.float32, copy=False))
        self._zeros.append(made.zero)
        q = _filled(made.q, made.zero, kind.block)
        return q if kind.bits == 8 else packed_pairs(q)

    def rest(self) -> dict[str, Array]:
        scale = np.concatenate(self._scales)
        if self._kind.bits == 8:
            return {"q8_scale": scale}
        zero = np.concatenate(self._zeros)
        odd = zero.shape[1] % 2
        return {"q4_scale": scale, "q4_zero": packed_pairs(np.pad(zero, ((0, 0), (0, odd))))}


class _ChannelEncoder:
    """Rows become columns, so the whole weight has to be held: N * K bytes."""

    def __init__(self, rows: int, columns: int) -> None:
        self._weight = np.empty((columns, rows), np.int8)
        self._scale = np.empty(rows, np.float32)
        self._done = 0

    def add(self, name: str, rows: Array) -> Array:
        stop = self._done + len(rows)
        q, self._scale[self._done : stop] = per_channel(name, rows)
        self._weight[:, self._done : stop] = q.T
        self._done = stop
        whole = stop == self._weight.shape[1]
        return self._weight if whole else self._weight[:0]

    def rest(self) -> dict[str, Array]:
        return {"w8_scale": self._scale}


def packed_pairs(values: Array) -> Array:
    """Pairs of 4-bit values along the last axis -> bytes, the first in the low half."""
    made: Array = values[..., 0::2] | (values[..., 1::2] << 4)
    return made


def _filled(q: Array, zero: Array, block: int) -> Array:
    """[n, K] -> [n, blocks, block]; the rest of the last block stands for zero."""
    n, k = q.shape
    out = np.repeat(zero[..., None], block, axis=2)
    out.reshape(n, -1)[:, :k] = q
    return out
