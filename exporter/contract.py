"""From the facts of the attention calls to the tables that describe the graphs. Pure data."""

from collections.abc import Iterator

from trtllm_lite.exporter.graft import AttentionFacts
from trtllm_lite.runtime.manifest import GraphSpec, KVLayer, KVSpec, Phase, Role, TensorSpec

BATCH, SEQ, NUM_LOGITS, CAPACITY = "batch", "seq", "num_logits", "capacity"


def kv_spec(facts: list[AttentionFacts], dtype: str, recompute_at: int | None) -> KVSpec:
    """The cache contract: one entry per attention call."""
    layers = tuple(KVLayer(f.num_kv_heads, f.head_dim, f.sliding_window) for f in facts)
    return KVSpec(dtype=dtype, layers=layers, recompute_at=recompute_at)


def graph_spec(
    phase: Phase,
    kv: KVSpec,
    vocab_size: int,
    *,
    multi_token: bool = True,
    more: tuple[TensorSpec, ...] = (),
    more_outputs: tuple[TensorSpec, ...] = (),
) -> GraphSpec:
    """The table of one graph, in graph order. All phases may have the same: a decode graph that
    takes several tokens a row can verify guessed ones. Otherwise there is one token a row."""
    wanted = NUM_LOGITS if multi_token else 1
    logits = TensorSpec("logits", "logits", "float32", (BATCH, wanted, vocab_size))
    return GraphSpec(
        phase=phase,
        file=f"{phase}.onnx",
        inputs=(*_step_inputs(kv, multi_token), *more, *_cache("past", kv)),
        outputs=(logits, *more_outputs, *_cache("present", kv)),
    )


def _step_inputs(kv: KVSpec, multi_token: bool) -> Iterator[TensorSpec]:
    yield TensorSpec("input_ids", "input_ids", "int64", (BATCH, SEQ if multi_token else 1))
    yield TensorSpec("past_lens", "past_lens", "int32", (BATCH,))
    if multi_token:
        yield TensorSpec("query_lens", "query_lens", "int32", (BATCH,))
    if kv.recompute_at is not None:
        yield TensorSpec("context_lens", "context_lens", "int32", (BATCH,))
    if multi_token:
        yield TensorSpec("logits_indices", "logits_indices", "int64", (BATCH, NUM_LOGITS))


def _cache(prefix: str, kv: KVSpec) -> Iterator[TensorSpec]:
    roles: dict[str, tuple[Role, Role]] = {
        "past": ("past_key", "past_value"),
        "present": ("present_key", "present_value"),
    }
    for index, layer in enumerate(kv.layers):
        shape = (BATCH, layer.num_kv_heads, CAPACITY, layer.head_dim)
        for role in roles[prefix]:
            yield TensorSpec(f"{role}_{index}", role, kv.dtype, shape, index)
