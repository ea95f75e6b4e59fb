"""GroupQueryAttention, as traced, in operators of ai.onnx 24: TensorScatter and Attention.

K and V of the run are written into the cache in place by TensorScatter. What attends depends on the
graph: prefill sees the K and V of its own run alone, decode and extend see the cache. Of the ways
to say what a query sees, each case has the one that TensorRT can compute rightly:

* `is_causal` over the run's own keys, which are as many as the queries;
* `nonpad_kv_seqlen` [batch] over the cache, with `is_causal` where a row has several queries: the
  last query is aligned with the last of so many keys. TensorRT's parser drops the input; whoever
  builds the engine has to put it back;
* a bool mask for sliding windows, over both, and over the cache for all where that is asked for.

Softcaps, sinks and heads of sizes that TensorRT's kernels do not take become products
(`exporter/passes/grouped_attention.py`). Queries are scaled before, so that the cache need not be.
Source: ONNX operators, Attention-24 and TensorScatter-24.
"""

from dataclasses import dataclass

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims, remove_dead, take_over
from trtllm_lite.exporter.passes.grouped_attention import Grouping, grouped_attention
from trtllm_lite.exporter.passes.place import Place
from trtllm_lite.exporter.passes.shared_values import SharedValues
from trtllm_lite.runtime.manifest import Phase

HEADS_FIRST = [0, 2, 1, 3]
SINKS = 11
HEAD_STEP, SMALLEST_HEAD, LARGEST_HEAD = 8, 16, 256


def standard_attention(model: ir.Model, phase: Phase, *, masked: bool = False) -> int:
    """Rewrite every GroupQueryAttention without rotary embedding; returns how many.

    Attention nodes are named `attention.<n>`, by their place in the graph. masked: over the cache,
    a mask says what a query sees, and no lengths.
    """
    nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    if nodes:
        shared = SharedValues(model.graph, nodes[0])
        for index, node in enumerate(nodes):
            _rewrite(_Call(node, Place(node), shared, phase, f"attention.{index}", masked))
        remove_dead(nodes)
    return len(nodes)


def head_has_kernel(head_dim: int) -> bool:
    """Whether TensorRT's attention kernels take heads of that size."""
    return head_dim % HEAD_STEP == 0 and SMALLEST_HEAD <= head_dim <= LARGEST_HEAD


@dataclass(frozen=True, eq=False)
class _Call:
    """A node, where its successors stand, and what they share with those of other layers."""

    node: ir.Node
    place: Place
    shared: SharedValues
    phase: Phase
    name: str
    masked: bool

    @property
    def grouping(self) -> Grouping:
        past, given = dims(self.node.inputs[3]), self.node.attributes
        assert past is not None
        kv_heads = given.get_int("kv_num_heads")
        return Grouping(kv_heads, given.get_int("num_heads") // kv_heads, int(past[3]))

    @property
    def window(self) -> int | None:
        window = self.node.attributes.get_int("local_window_size", -1)
        return window if window > 0 else None

    @property
    def softcap(self) -> float:
        return self.node.attributes.get_float("softcap", 0.0)

    @property
    def sinks(self) -> ir.Value | None:
        return self.node.inputs[SINKS] if len(self.node.inputs) > SINKS else None

    @property
    def over_cache(self) -> bool:
        return self.phase != "prefill"

    @property
    def has_kernel(self) -> bool:
        """Whether one Attention node can compute it."""
        fits = head_has_kernel(self.grouping.head_dim)
        return fits and not self.softcap and self.sinks is None

    def mask(self) -> ir.Value:
        make = self.shared.cache_mask if self.over_cache else self.shared.fresh_mask
        return make(self.window)


def _rewrite(call: _Call) -> None:
    node, grouping = call.node, call.grouping
    assert not node.attributes.get_int("do_rotary", 0)
    query, key, value, past_key, past_value = node.inputs[:5]
    fresh = [_heads_first(call, x, grouping.kv_heads) for x in (key, value)]
    written = [
        _written(call, past, new, old)
        for past, new, old in zip((past_key, past_value), fresh, node.outputs[1:], strict=True)
    ]
    keys, values = written if call.over_cache else fresh
    scaled = _scaled(call, query)
    out = _kernel(call, scaled, keys, values) if call.has_kernel else None
    if out is None:
        out = grouped_attention(
            call.place,
            grouping,
            (scaled, keys, values),
            call.mask(),
            softcap=call.softcap,
            sinks=call.sinks,
        )
    take_over(node.outputs[0], out)


def _scaled(call: _Call, query: ir.Value | None) -> ir.Value:
    assert query is not None
    assert query.dtype is not None
    scale = call.place.number(call.node.attributes.get_float("scale"), query.dtype)
    return call.place.op("Mul", query, scale, shape=dims(query))


def _written(call: _Call, past: ir.Value | None, fresh: ir.Value, present: ir.Value) -> ir.Value:
    """The cache with the rows of the run, as the graph's output."""
    made = call.place.op(
        "TensorScatter", past, fresh, call.shared.write_indices, axis=-2, mode="linear"
    )
    take_over(present, made)
    return made


def _kernel(call: _Call, query: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
    """[batch, seq, heads * head_dim]"""
    inputs: list[ir.Value | None] = [keys, values]
    causal = call.phase != "decode"
    if call.window is not None or (call.over_cache and call.masked):
        inputs.append(call.mask())
        causal = False
    elif call.over_cache:
        inputs += [None, None, None, call.shared.visible_lens]
    by_head = _heads_first(call, query, call.grouping.heads)
    out = call.place.op(
        "Attention", by_head, *inputs, shape=dims(by_head), scale=1.0, is_causal=int(causal)
    )
    node = out.producer()
    assert node is not None
    node.name = call.name
    back = call.place.op("Transpose", out, perm=HEADS_FIRST)
    width = call.grouping.heads * call.grouping.head_dim
    return call.place.op("Reshape", back, call.place.ints(0, 0, width))


def _heads_first(call: _Call, value: ir.Value | None, heads: int) -> ir.Value:
    """[batch, seq, heads * head_dim] -> [batch, heads, seq, head_dim]."""
    size, dim = dims(value), call.grouping.head_dim
    assert size is not None
    shape = (*size[:2], heads, dim)
    apart = call.place.op("Reshape", value, call.place.ints(0, 0, heads, dim), shape=shape)
    shape = (size[0], heads, size[1], dim)
    return call.place.op("Transpose", apart, perm=HEADS_FIRST, shape=shape)
