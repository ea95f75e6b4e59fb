"""From rows of float weights to integers: the seam between formats and the algorithms that choose
the integers."""

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.short_float import LARGEST, rounded

Array = npt.NDArray[Any]
HALVES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Of a scale that is rounded down by more, the largest weights of a block would be clipped.
ROUNDED_DOWN = np.float32(1 - 2.0**-8)


@dataclass(frozen=True)
class Quantized:
    """Integers of n rows of K weights in blocks along K; the last block may be shorter.

    q: uint8 [n, K]. scale: float32 [n, ceil(K / block)], of which 16 bits say all. zero: uint8, the
    shape of scale. The weight is (q - zero) * scale; where scale is 0, q is zero.
    """

    q: Array
    scale: Array
    zero: Array


class Quantizer(Protocol):
    """Chooses the integers of a weight's rows. Rows of a weight are independent of each other and
    come in order, in pieces; `name` is the parameter's name in the model."""

    def quantize(
        self, name: str, rows: Array, bits: int, block: int, scales: str = "float32"
    ) -> Quantized:
        """rows: float32 [n, K]. scales: the type that they are stored in, as of `short_scale`."""


class RoundToNearest:
    """Each weight to the nearest integer: 8 bits symmetric about 128 by the block's largest
    magnitude, fewer bits from the block's least to its largest value."""

    def quantize(
        self, name: str, rows: Array, bits: int, block: int, scales: str = "float32"
    ) -> Quantized:
        blocks = blocked(finite(name, rows), block)
        low, zero = _symmetric(blocks) if bits == 8 else _asymmetric(blocks, bits)
        scale = short_scale(name, low, scales)
        steps = np.rint(blocks * _inverse(scale)[..., None])
        q = np.clip(steps + zero[..., None], 0, 2**bits - 1).astype(np.uint8)
        n, k = rows.shape
        return Quantized(q.reshape(n, -1)[:, :k], scale, zero.astype(np.uint8))


def per_channel(name: str, rows: Array) -> tuple[Array, Array]:
    """Symmetric int8 with one scale a row: int8 [n, K] in -127..127, float32 [n]."""
    scale = np.abs(finite(name, rows)).max(axis=1) / np.float32(127)
    return np.rint(rows * _inverse(scale)[:, None]).astype(np.int8), scale


def dequantized(value: Quantized, block: int) -> Array:
    """The weights that the integers stand for, float32 [n, K]."""
    k = value.q.shape[1]
    scale, zero = (np.repeat(x, block, axis=1)[:, :k] for x in (value.scale, value.zero))
    made: Array = (value.q.astype(np.float32) - zero.astype(np.float32)) * scale
    return made


def blocked(rows: Array, block: int) -> Array:
    """[n, K] -> [n, ceil(K / block), block], zeros after K."""
    n, k = rows.shape
    count = -(-k // block)
    return np.pad(rows, ((0, 0), (0, count * block - k))).reshape(n, count, block)


def finite(name: str, rows: Array) -> Array:
    """The rows. Raises UnsupportedError when one holds NaN or infinity: its scale would too."""
    if not np.isfinite(rows).all():
        raise UnsupportedError(
            f"quantizing NaN or infinity (in {name})",
            "finite weights",
            "export with --quantize none, or repair the checkpoint",
        )
    return rows


def short_scale(name: str, scale: Array, stored: str = "float32") -> Array:
    """Scales as near to these as 16 bits can say, float32. Integers are to be chosen for what this
    gives, so that nothing is lost by it. Raises UnsupportedError for one that is too large.

    stored: the type that a graph has them in: float16 or bfloat16, or float32, which are the
    numbers of `runtime/short_float.py`. Where float16 has few digits left, the scale is the next
    larger one, so that no weight is clipped.
    """
    half = HALVES.get(stored)
    largest = LARGEST if half is None else float(ml_dtypes.finfo(half).max)
    if scale.size and scale.max() > largest:
        raise UnsupportedError(
            f"quantizing with a scale of {scale.max():g} (in {name})",
            f"scales up to {largest:g}",
            "export with --quantize none, or repair the checkpoint",
        )
    if half is None:
        return rounded(scale)
    near = scale.astype(half)
    short = near.astype(np.float32) < scale * ROUNDED_DOWN
    made: Array = np.where(short, np.nextafter(near, half(np.inf)), near).astype(np.float32)
    return made


def _symmetric(blocks: Array) -> tuple[Array, Array]:
    scale = np.abs(blocks).max(axis=-1) / np.float32(127)
    return scale, np.full(scale.shape, 128, np.float32)


def _asymmetric(blocks: Array, bits: int) -> tuple[Array, Array]:
    """Zero is always among the values, so that padding and zeroed weights stay exact."""
    top = np.float32(2**bits - 1)
    low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    scale = (high - low) / top
    return scale, np.clip(np.rint(-low * _inverse(scale)), 0, top)


def _inverse(scale: Array) -> Array:
    """1 / scale, 0 where that is not a number: such blocks are all zero, or so small that they
    count as it."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    made: Array = np.where(np.isfinite(inverse), inverse, np.float32(0))
    return made
