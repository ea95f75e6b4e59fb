"""Rewrites of a traced graph. Each takes an onnx_ir model, changes it in place, and returns in how
many places it did."""

from trtllm_lite.exporter.passes.activation import fuse_activation, fuse_gelu
from trtllm_lite.exporter.passes.attention import fold_scale, pack_attention
from trtllm_lite.exporter.passes.compute import compute_in
from trtllm_lite.exporter.passes.constants import fold_constants
from trtllm_lite.exporter.passes.edit import MICROSOFT
from trtllm_lite.exporter.passes.heads import regroup_heads
from trtllm_lite.exporter.passes.layout import simplify_layouts, split_slices
from trtllm_lite.exporter.passes.linear import fuse_linear, pack_projections, turn_weights
from trtllm_lite.exporter.passes.norm import (
    SKIP,
    SUM,
    fold_offsets,
    fuse_layer_norm,
    fuse_rms_norm,
    fuse_skip_norm,
)
from trtllm_lite.exporter.passes.notes import drop_trace_notes, scopes
from trtllm_lite.exporter.passes.on_device import count_on_device, give_largest, take_longest
from trtllm_lite.exporter.passes.one_token import drop_unread_inputs, take_one_token
from trtllm_lite.exporter.passes.products import plain_products
from trtllm_lite.exporter.passes.rotary import fold_rotary
from trtllm_lite.exporter.passes.rotary_node import fuse_rotary
from trtllm_lite.exporter.passes.rows import widen_rows
from trtllm_lite.exporter.passes.standard_attention import standard_attention
from trtllm_lite.exporter.passes.tokens import hoist_tokens, pick_tokens
from trtllm_lite.exporter.passes.weights import (
    add_storage_casts,
    drop_unused_weights,
    external_weights,
    pack_weights,
    take_tables,
    weight_arrangements,
    weight_offset,
    weight_parts,
)

__all__ = [
    "MICROSOFT",
    "SKIP",
    "SUM",
    "add_storage_casts",
    "compute_in",
    "count_on_device",
    "drop_trace_notes",
    "drop_unread_inputs",
    "drop_unused_weights",
    "external_weights",
    "fold_constants",
    "fold_offsets",
    "fold_rotary",
    "fold_scale",
    "fuse_activation",
    "fuse_gelu",
    "fuse_layer_norm",
    "fuse_linear",
    "fuse_rms_norm",
    "fuse_rotary",
    "fuse_skip_norm",
    "give_largest",
    "hoist_tokens",
    "pack_attention",
    "pack_projections",
    "pack_weights",
    "pick_tokens",
    "plain_products",
    "regroup_heads",
    "scopes",
    "simplify_layouts",
    "split_slices",
    "standard_attention",
    "take_longest",
    "take_one_token",
    "take_tables",
    "turn_weights",
    "weight_arrangements",
    "weight_offset",
    "weight_parts",
    "widen_rows",
]
