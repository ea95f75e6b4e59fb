"""The `cpu` target: ONNX Runtime's CPU provider.

Attention is com.microsoft GroupQueryAttention, which writes K and V in place when past and present
are bound to one buffer, costs nothing for capacity that is not used, and with `query_seqlens`
takes right-padded rows that continue from caches of different lengths. It is traced without its
rotary embedding, as the model's own code rotates; `fold_rotary` moves it in where it can.
Source: ONNX Runtime, docs/ContribOperators.md, com.microsoft.GroupQueryAttention.
"""

from functools import partial
from typing import Any

import torch

from trtllm_lite.exporter.graft import AttentionFacts, Lengths
from trtllm_lite.exporter.lowering.base import Pass, Target
from trtllm_lite.exporter.passes import (
    fold_rotary,
    fold_scale,
    fuse_activation,
    fuse_layer_norm,
    fuse_linear,
    fuse_rms_norm,
    fuse_rotary,
    fuse_skip_norm,
    hoist_tokens,
    pack_attention,
    pack_projections,
    pick_tokens,
    regroup_heads,
    simplify_layouts,
    split_slices,
    turn_weights,
    widen_rows,
)

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
    projected = (packed_q, _packed(k), _packed(v))
    optional = (*NO_ROTARY_OR_BIAS, sinks, *NO_SCALES_OR_NORMS)
    out, present_k, present_v = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [*projected, *caches, *optional, lengths.query],
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


def passes(max_model_len: int) -> tuple[tuple[str, Pass], ...]:
    """In this order: each finds what the ones before it have left.

    Linear layers and norms become single nodes first. Layers that read one value are packed, and
    rotary embedding goes into the attention; then nothing but layout stands between the packed
    projection and the attention, which goes, and the attention reads the projection itself. What
    is left is fused by twos: an addition with the norm after it, an activation. Last, all that
    follows the last attention is computed for the wanted tokens only.
    """
    return (
        ("fuse_linear", fuse_linear),
        ("widen_rows", widen_rows),
        ("turn_weights", turn_weights),
        ("fuse_rms_norm", fuse_rms_norm),
        ("fuse_layer_norm", fuse_layer_norm),
        ("pack_projections", pack_projections),
        ("fold_rotary", partial(fold_rotary, length=max_model_len)),
        ("fuse_rotary", partial(fuse_rotary, length=max_model_len)),
        ("split_slices", split_slices),
        ("regroup_heads", regroup_heads),
        ("simplify_layouts", simplify_layouts),
        ("fold_scale", fold_scale),
        ("pack_attention", pack_attention),
        ("fuse_skip_norm", fuse_skip_norm),
        ("fuse_activation", fuse_activation),
        ("pick_tokens", pick_tokens),
        ("hoist_tokens", hoist_tokens),
    )


TARGET = Target(
    name="cpu",
    opset=23,
    emit=attention,
    passes=passes,
    required=frozenset({"simplify_layouts", "pick_tokens"}),
)
