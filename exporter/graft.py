"""What is replaced in transformers' own modelling code: attention, masks and the last step.

A model asks `AttentionInterface` for its attention function and `AttentionMaskInterface` for its
mask; both are extension points of transformers. `probe` runs the model once on fake tensors and
records what each attention call needs; the facts become the KV contract, with no config key read.
While tracing, the hook hands queries, keys and values to the target's attention operator together
with the layer's cache tensors, and the model never sees a cache or a mask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from trtllm_lite.exporter.skeleton import Skeleton
from trtllm_lite.models.longrope import set_context_lens
from trtllm_lite.runtime.errors import UnsupportedError

TRACE = "trtllm_lite"
PROBE = "trtllm_lite_probe"
SUPPORTED = "causal self-attention, full or sliding, with softcap and sinks"
# Arguments that say nothing about the result: dropout is off in eval mode, positions are ours.
NEUTRAL = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "training",
    "use_cache",
}

Tensor = torch.Tensor


@dataclass(frozen=True)
class AttentionFacts:
    """One attention call: heads, scale of the scores, window (tokens seen, itself included),
    softcap of the scores, and whether it has attention sinks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Lengths:
    """Row lengths inside a graph, int32: past [batch], query [batch], total [batch] (tokens in the
    cache after this step), longest [] (the largest total)."""

    past: Tensor
    query: Tensor
    total: Tensor
    longest: Tensor


Emit = Callable[
    [AttentionFacts, Tensor, Tensor, Tensor, Tensor, Tensor, Lengths, Tensor | None],
    tuple[Tensor, Tensor, Tensor],
]


@dataclass
class GraphPass:
    """One forward through the grafted model: the caches in, the caches out, in layer order."""

    facts: list[AttentionFacts]
    emit: Emit
    past: list[tuple[Tensor, Tensor]]
    lengths: Lengths
    present: list[Tensor] = field(default_factory=list)
    calls: int = 0


@dataclass
class ProbePass:
    """One forward that only records."""

    facts: list[AttentionFacts] = field(default_factory=list)


_current: ContextVar[GraphPass | ProbePass] = ContextVar("trtllm_lite_pass")


@contextmanager
def running(current: GraphPass | ProbePass) -> Iterator[None]:
    """Attention calls made inside belong to `current`."""
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)


def probe(skeleton: Skeleton) -> list[AttentionFacts]:
    """Facts of every attention call, in call order.

    Raises UnsupportedError when the model's attention does not go through the interface, is not
    causal, or passes arguments whose meaning is not known here.
    """
    current = ProbePass()
    skeleton.model.set_attn_implementation(PROBE)
    with running(current), skeleton.fake_mode, torch.no_grad():
        set_context_lens(skeleton.model, torch.zeros(1, dtype=torch.int32))
        ids = torch.zeros((1, 3), dtype=torch.int64)
        positions = torch.arange(3, dtype=torch.int64)[None]
        # With a mask given, transformers does not look for packed sequences in the positions.
        mask = torch.ones((1, 3), dtype=torch.int64)
        skeleton.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    skeleton.model.set_attn_implementation(TRACE)
    if not current.facts:
        raise UnsupportedError(
            "its own attention code (the model ignores transformers' AttentionInterface)",
            SUPPORTED,
            "see `trtllm-lite families` for models that are proved",
        )
    return current.facts


def _probe_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **kw: Any
) -> tuple[Tensor, None]:
    current = _current.get()
    assert isinstance(current, ProbePass)
    current.facts.append(_facts(module, q, k, v, mask, scaling, kw))
    return v.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3])), None


def _trace_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **kw: Any
) -> tuple[Tensor, None]:
    current = _current.get()
    assert isinstance(current, GraphPass)
    facts, (past_k, past_v) = current.facts[current.calls], current.past[current.calls]
    current.calls += 1
    sinks = kw.get("s_aux") if facts.sinks else None
    out, *present = current.emit(facts, q, k, v, past_k, past_v, current.lengths, sinks)
    current.present += present
    return out, None


def _facts(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scaling: float | None,
    kw: dict[str, Any],
) -> AttentionFacts:
    known = {"sliding_window", "softcap", "s_aux"} | NEUTRAL
    unknown = [name for name, value in kw.items() if value is not None and name not in known]
    if unknown or getattr(module, "is_cross_attention", False) or k.shape[3] != v.shape[3]:
        what = ", ".join(unknown) or "cross-attention or unequal K and V head sizes"
        raise _unsupported(f"attention with {what}")
    if k.shape[2] != q.shape[2]:
        raise _unsupported("attention over more keys than queries without a cache")
    return AttentionFacts(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[3],
        scale=float(q.shape[3] ** -0.5 if scaling is None else scaling),
        sliding_window=_window(mask, kw.get("sliding_window")),
        softcap=float(kw["softcap"]) if kw.get("softcap") else None,
        sinks=kw.get("s_aux") is not None,
    )


def _window(mask: Any, argument: int | None) -> int | None:
    """The window that the mask shows; the `sliding_window` argument has to agree with it."""
    if not isinstance(mask, MaskShape):
        raise _unsupported("an attention mask that is made outside transformers' mask interface")
    if argument is not None and mask.sliding_window not in (None, argument):
        raise _unsupported(f"a window of {argument} under a mask of {mask.sliding_window}")
    return mask.sliding_window


class MaskShape(torch.Tensor):
    """Stands for a mask while probing, and carries its window."""

    sliding_window: int | None = None


def _probe_mask(
    *args: Any, mask_function: Any = None, local_size: int | None = None, **kw: Any
) -> Any:
    """Called instead of building a mask: finds out whether it is causal, and its window."""
    with unset_fake_temporarily():
        shape = torch.empty(0).as_subclass(MaskShape)
        shape.sliding_window = _classify(mask_function, local_size)
        return shape


def _classify(mask_function: Any, local_size: int | None) -> int | None:
    """Compare the mask with plain causal, then with a causal window of `local_size`."""
    size = 2 * local_size + 3 if local_size else 64
    queries = sorted({0, 1, size // 3, size // 2, size - 2, size - 1})
    visible = {q: _visible(mask_function, q, size) for q in queries}
    if all(visible[q] == (0, q) for q in queries):
        return None
    if local_size and all(visible[q] == (max(0, q - local_size + 1), q) for q in queries):
        return local_size
    raise _unsupported("an attention mask that is neither causal nor a causal sliding window")


def _visible(mask_function: Any, query: int, size: int) -> tuple[int, int] | None:
    """First and last visible key when the visible keys are contiguous."""
    zero, q = torch.tensor(0), torch.tensor(query)
    keys = torch.arange(size)
    seen = torch.stack([torch.as_tensor(mask_function(zero, zero, q, k)) for k in keys])
    index = torch.nonzero(seen.reshape(-1)).reshape(-1)
    if len(index) == 0 or int(index[-1] - index[0]) + 1 != len(index):
        return None
    return int(index[0]), int(index[-1])


def _unsupported(needs: str) -> UnsupportedError:
    return UnsupportedError(needs, SUPPORTED, "see `trtllm-lite families`")


AttentionInterface.register(TRACE, _trace_attention)
AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
