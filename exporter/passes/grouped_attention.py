"""Attention as products, for what no attention operator of TensorRT computes.

Queries of heads that share a K head are grouped, so that neither K nor V is repeated: scores are
[batch, kv_heads, group, seq, keys]. Softcap and softmax are float32 whatever the rest is: a capped
score of 50 would lose 0.03 in float16, 0.2 in bfloat16.
Sources: GQA, arXiv:2305.13245; softcaps, Gemma 2, arXiv:2408.00118; sinks, arXiv:2309.17453: one
more score a head, which takes its share of the softmax and has no value.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims
from trtllm_lite.exporter.passes.place import Place

FLOAT = ir.DataType.FLOAT
# [batch, seq, kv_heads, group, head_dim] -> [batch, kv_heads, group, seq, head_dim], and back.
APART, TOGETHER = [0, 2, 3, 1, 4], [0, 3, 1, 2, 4]
KEYS_LAST = [0, 1, 2, 4, 3]


@dataclass(frozen=True)
class Grouping:
    """`group` query heads to each of `kv_heads`, one after the other."""

    kv_heads: int
    group: int
    head_dim: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def grouped_attention(
    place: Place,
    grouping: Grouping,
    tensors: tuple[ir.Value, ir.Value, ir.Value],
    mask: ir.Value,
    *,
    softcap: float = 0.0,
    sinks: ir.Value | None = None,
) -> ir.Value:
    """[batch, seq, heads * head_dim].

    tensors: queries [batch, seq, heads * head_dim], which are scaled, and K and V [batch, kv_heads,
    keys, head_dim]. mask: bool [.., seq, keys]. sinks: [heads].
    """
    query, key, value = tensors
    assert query.dtype is not None
    scores = place.op("MatMul", _grouped(place, query, grouping), _turned(place, key))
    wide = _cast(place, scores, FLOAT)
    if softcap:
        wide = _capped(place, wide, softcap)
    seen = _for_groups(place, mask)
    visible = place.op("Where", seen, wide, _lowest(place), dtype=FLOAT)
    weights = _softmax(place, visible) if sinks is None else _sunk(place, visible, sinks, grouping)
    shares = _cast(place, weights, query.dtype)
    out = place.op("MatMul", shares, place.op("Unsqueeze", value, place.ints(2)))
    back = place.op("Transpose", out, perm=TOGETHER)
    width = grouping.heads * grouping.head_dim
    return place.op("Reshape", back, place.ints(0, 0, width))


def _grouped(place: Place, query: ir.Value, grouping: Grouping) -> ir.Value:
    shape = place.ints(0, 0, grouping.kv_heads, grouping.group, grouping.head_dim)
    return place.op("Transpose", place.op("Reshape", query, shape), perm=APART)


def _turned(place: Place, key: ir.Value) -> ir.Value:
    return place.op("Transpose", place.op("Unsqueeze", key, place.ints(2)), perm=KEYS_LAST)


def _for_groups(place: Place, mask: ir.Value) -> ir.Value:
    """[batch, 1, seq, keys] -> [batch, 1, 1, seq, keys]; [seq, keys] needs no change."""
    size = dims(mask)
    assert size is not None
    return mask if len(size) == 2 else place.op("Unsqueeze", mask, place.ints(2))


def _capped(place: Place, scores: ir.Value, softcap: float) -> ir.Value:
    cap = place.number(softcap, FLOAT)
    return place.op("Mul", place.op("Tanh", place.op("Div", scores, cap)), cap)


def _cast(place: Place, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    return value if value.dtype == dtype else place.op("Cast", value, dtype=dtype, to=dtype)


def _lowest(place: Place) -> ir.Value:
    return place.number(float(np.finfo(np.float32).min), FLOAT)


def _softmax(place: Place, scores: ir.Value) -> ir.Value:
    return place.op("Softmax", scores, axis=-1)


def _sunk(place: Place, scores: ir.Value, sinks: ir.Value, grouping: Grouping) -> ir.Value:
    """The softmax of the scores and the head's sink together, without the sink's share."""
    shape = place.ints(1, grouping.kv_heads, grouping.group, 1, 1)
    sink = place.op("Reshape", _cast(place, sinks, FLOAT), shape)
    last = place.ints(-1)
    most = place.op("Max", place.op("ReduceMax", scores, last, keepdims=1), sink)
    powers = place.op("Exp", place.op("Sub", scores, most))
    rest = place.op("Exp", place.op("Sub", sink, most))
    whole = place.op("Add", place.op("ReduceSum", powers, last, keepdims=1), rest)
    return place.op("Div", powers, whole)
