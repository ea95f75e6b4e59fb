"""Rules about Attention: what the parser drops, misreads or refuses.

`nonpad_kv_seqlen` is parsed and dropped, and `is_causal` becomes a mask that is aligned with the
first key. Engine builders put lengths back, and align the mask with the last key of a row, on every
node that has them; nodes without have to be right as they are parsed.
"""

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from trtllm_lite.exporter.passes.edit import dims
from trtllm_lite.exporter.passes.standard_attention import head_has_kernel

QUERY, KEY, VALUE, MASK, PAST_KEY, PAST_VALUE, LENGTHS = range(7)
# What comes out of them is what went in, in another shape.
MOVES = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph if node.op_type == "Attention")


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if len(node.inputs) > index else None


def _over_cache(node: ir.Node, index: int = KEY) -> bool:
    """Whether an input is an updated cache, in whatever shape."""
    value = _input(node, index)
    made = value.producer() if value is not None else None
    while made is not None and made.op_type in MOVES:
        source = made.inputs[0]
        made = source.producer() if source is not None else None
    return made is not None and made.op_type == "TensorScatter"


def _is_causal(node: ir.Node) -> bool:
    return node.attributes.get_int("is_causal", 0) != 0


def _past(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if _input(node, PAST_KEY) is not None or _input(node, PAST_VALUE) is not None:
            yield f"{node.name} has past_key or past_value; the cache is a TensorScatter's"


def _outputs(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if len(node.outputs) > 1:
            yield f"{node.name} has {len(node.outputs)} outputs; one is taken"


def _softcap(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if node.attributes.get_float("softcap", 0.0):
            yield f"{node.name} has a softcap"


def _precision(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if "softmax_precision" in node.attributes:
            yield f"{node.name} has a softmax_precision"


def _scale(model: ir.Model) -> Iterator[str]:
    """Any other becomes a product over the whole cache."""
    for node in _nodes(model):
        scale = node.attributes.get_float("scale", 0.0)
        if scale != 1.0:
            yield f"{node.name} has the scale {scale:g}; queries are scaled before, and it is 1"


def _rank(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        ranks = [len(dims(_input(node, i)) or ()) for i in (QUERY, KEY, VALUE)]
        if ranks != [4, 4, 4]:
            yield f"{node.name} has inputs of {ranks} dimensions; all have 4"


def _types(model: ir.Model) -> Iterator[str]:
    """Parsed, and refused by the builder."""
    for node in _nodes(model):
        found = [v.dtype for i in (QUERY, KEY, VALUE) if (v := _input(node, i)) is not None]
        if len(set(found)) != 1:
            names = ", ".join(str(kind) for kind in found)
            yield f"{node.name} has inputs of types {names}; all have one"


def _pair(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if _over_cache(node, KEY) != _over_cache(node, VALUE):
            yield f"{node.name} has one of keys and values in the cache; it is both or none"


def _head_size(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        size = (dims(_input(node, QUERY)) or (0,))[-1]
        if not isinstance(size, int) or not head_has_kernel(size):
            yield f"{node.name} has heads of {size}; allowed: multiples of 8 from 16 to 256"


def _mask_type(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        mask = _input(node, MASK)
        if mask is not None and mask.dtype != ir.DataType.BOOL:
            yield f"{node.name} has a mask of type {mask.dtype}; it is bool"


def _causal_mask(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if _input(node, MASK) is not None and _is_causal(node):
            yield f"{node.name} has a mask and is_causal; the mask says all"


def _lengths_and_mask(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if _input(node, MASK) is not None and _input(node, LENGTHS) is not None:
            yield f"{node.name} has a mask and lengths; it is one or the other"


def _unbounded(model: ir.Model) -> Iterator[str]:
    """Rows of the cache that hold nothing would be seen."""
    for node in _nodes(model):
        bounded = _input(node, MASK) is not None or _input(node, LENGTHS) is not None
        if _over_cache(node) and not bounded:
            yield f"{node.name} sees the whole cache; it needs lengths or a mask"


def _fresh_lengths(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        if _input(node, LENGTHS) is not None and not _over_cache(node):
            yield f"{node.name} has lengths of keys that are not the cache"


def _alignment(model: ir.Model) -> Iterator[str]:
    """A single query that is aligned with the first key would see one key."""
    for node in _nodes(model):
        size = dims(_input(node, QUERY))
        if _input(node, LENGTHS) is None or size is None or len(size) != 4:
            continue
        if _is_causal(node) != (size[2] != 1):
            causal = int(_is_causal(node))
            yield f"{node.name} has lengths and is_causal={causal} for {size[2]} tokens"


def _open_future(model: ir.Model) -> Iterator[str]:
    for node in _nodes(model):
        bounded = _input(node, MASK) is not None or _input(node, LENGTHS) is not None
        if not bounded and not _over_cache(node) and not _is_causal(node):
            yield f"{node.name} sees later tokens; it needs is_causal or a mask"


ATTENTION_RULES: Mapping[str, Callable[[ir.Model], Iterator[str]]] = {
    "attention_past": _past,
    "attention_outputs": _outputs,
    "attention_softcap": _softcap,
    "attention_precision": _precision,
    "attention_scale": _scale,
    "attention_rank": _rank,
    "attention_types": _types,
    "attention_pair": _pair,
    "attention_head_size": _head_size,
    "attention_mask_type": _mask_type,
    "attention_causal_mask": _causal_mask,
    "attention_lengths_and_mask": _lengths_and_mask,
    "attention_unbounded": _unbounded,
    "attention_fresh_lengths": _fresh_lengths,
    "attention_alignment": _alignment,
    "attention_future": _open_future,
}
