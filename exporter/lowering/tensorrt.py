"""The `tensorrt` target: what TensorRT's ONNX parser takes without a plugin, ai.onnx 24 alone.

Three graphs. Prefill attends over the K and V of its own run, which costs a fraction of the scratch
memory that attention over the cache takes; decode takes one token a row; extend takes several
tokens a row over the cache. K and V lie in [batch, kv_heads, capacity, head_dim] and are written in
place by TensorScatter. The attention is traced as one operator that knows all that a layer needs,
as for the `cpu` target, and becomes standard ones at the end.

On ONNX Runtime's CPU provider these graphs compute the same, slowly: a step's cost grows with the
capacity of the cache.
Sources: ONNX operators 24; NVIDIA TensorRT, operator support of the ONNX parser.
"""

from dataclasses import replace
from functools import partial

import onnx_ir as ir

from trtllm_lite.exporter.lowering.base import Passes, Target
from trtllm_lite.exporter.lowering.cpu import attention
from trtllm_lite.exporter.passes import (
    drop_unread_inputs,
    fold_scale,
    fuse_gelu,
    fuse_layer_norm,
    fuse_linear,
    fuse_rms_norm,
    fuse_rotary,
    hoist_tokens,
    pack_projections,
    pick_tokens,
    plain_products,
    regroup_heads,
    simplify_layouts,
    split_slices,
    standard_attention,
    take_one_token,
    turn_weights,
    widen_rows,
)
from trtllm_lite.exporter.tensorrt_rules import check_graph, check_model
from trtllm_lite.runtime.manifest import GraphSpec

TRACED_OPSET, OPSET, IR_VERSION = 23, 24, 11


def passes(max_model_len: int) -> Passes:
    """As for the `cpu` target, without what becomes an operator of com.microsoft: rotary embedding
    stays a node of its own, and norms and activations stay what they are."""
    return (
        ("fuse_linear", fuse_linear),
        ("widen_rows", widen_rows),
        ("turn_weights", turn_weights),
        ("fuse_rms_norm", fuse_rms_norm),
        ("fuse_layer_norm", fuse_layer_norm),
        ("pack_projections", pack_projections),
        ("fuse_rotary", partial(fuse_rotary, length=max_model_len)),
        ("split_slices", split_slices),
        ("regroup_heads", regroup_heads),
        ("simplify_layouts", simplify_layouts),
        ("fold_scale", fold_scale),
        ("fuse_gelu", fuse_gelu),
        ("pick_tokens", pick_tokens),
        ("hoist_tokens", hoist_tokens),
    )


def phase_passes(spec: GraphSpec, *, masked: bool = False) -> Passes:
    one = () if spec.is_multi_token else (("take_one_token", take_one_token),)
    return (
        ("declare", _declare),
        *one,
        ("standard_attention", partial(standard_attention, phase=spec.phase, masked=masked)),
        ("drop_unread_inputs", drop_unread_inputs),
    )


def _declare(model: ir.Model) -> int:
    """TensorScatter, and lengths in Attention, are of opset 24; what was traced for 23 means the
    same there."""
    model.graph.opset_imports[""], model.ir_version = OPSET, IR_VERSION
    return 1


TARGET = Target(
    name="tensorrt",
    opset=TRACED_OPSET,
    emit=attention,
    passes=passes,
    required=frozenset({"simplify_layouts", "pick_tokens"}),
    phases=("prefill", "decode", "extend"),
    phase_passes=phase_passes,
    one_token_decode=True,
    computes_in_dtype=True,
    dequantizes=True,
    finish=(("plain_products", plain_products),),
    refuse=check_model,
    check=check_graph,
)
MASKED = replace(TARGET, phase_passes=partial(phase_passes, masked=True))
"""What attends over the cache is told by masks what it sees, never by lengths: right for whoever
parses the graphs as they are."""
