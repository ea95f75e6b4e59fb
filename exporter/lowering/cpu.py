"""The `cpu` target: ONNX Runtime's CPU provider.

Attention is com.microsoft GroupQueryAttention, which writes K and V in place when past and present
are bound to one buffer, costs nothing for capacity that is not used, and with `query_seqlens`
takes right-padded rows that continue from caches of different lengths. Rotary embedding stays
outside, as the model's own code traced it.
Source: ONNX Runtime, docs/ContribOperators.md, com.microsoft.GroupQueryAttention.
"""

from typing import Any

import torch

from trtllm_lite.exporter.graft import AttentionFacts, Lengths
from trtllm_lite.exporter.lowering.base import Target
from trtllm_lite.exporter.passes import fuse_linear, fuse_rms_norm

Tensor = torch.Tensor

# Optional inputs of the operator between those that are used.
NO_ROTARY_OR_BIAS: tuple[None, ...] = (None,) * 4
NO_SCALES_OR_NORMS: tuple[None, ...] = (None,) * 4


def attention(
    facts: AttentionFacts,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_k: Tensor,
    past_v: Tensor,
    lengths: Lengths,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [batch, heads, seq, head_dim] -> out [batch, seq, heads, head_dim], present K, V."""
    batch, heads, seq, dim = q.shape
    packed_q = _packed(q)
    caches: list[Tensor | None] = [past_k, past_v, lengths.total - 1, lengths.longest]
    inputs = [packed_q, _packed(k), _packed(v), *caches, *NO_ROTARY_OR_BIAS, sinks]
    if lengths.query is not None:
        inputs += [*NO_SCALES_OR_NORMS, lengths.query]
    out, present_k, present_v = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        _trimmed(inputs),
        attrs=_attributes(facts),
        dtypes=(q.dtype, past_k.dtype, past_v.dtype),
        shapes=(packed_q.shape, past_k.shape, past_v.shape),
        version=1,
    )
    return out.reshape(batch, seq, heads, dim), present_k, present_v


def _attributes(facts: AttentionFacts) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "num_heads": facts.num_heads,
        "kv_num_heads": facts.num_kv_heads,
        "scale": facts.scale,
        "do_rotary": 0,
    }
    if facts.sliding_window is not None:
        attributes["local_window_size"] = facts.sliding_window
    if facts.softcap is not None:
        attributes["softcap"] = facts.softcap
    return attributes


def _packed(x: Tensor) -> Tensor:
    """[batch, heads, seq, dim] -> [batch, seq, heads * dim]."""
    batch, heads, seq, dim = x.shape
    return x.transpose(1, 2).reshape(batch, seq, heads * dim)


def _trimmed(inputs: list[Tensor | None]) -> list[Tensor | None]:
    while inputs[-1] is None:
        inputs = inputs[:-1]
    return inputs


TARGET = Target(
    name="cpu",
    opset=23,
    emit=attention,
    passes=(("fuse_linear", fuse_linear), ("fuse_rms_norm", fuse_rms_norm)),
    required=frozenset({"fuse_linear"}),
)
