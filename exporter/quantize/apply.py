"""Float graphs and the options of an export -> the graphs that are written and what they store."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from trtllm_lite.exporter.external_data import IR_DTYPES, Stored, in_order, plain
from trtllm_lite.exporter.graphs import Graphs
from trtllm_lite.exporter.native.cache import cache_dtypes
from trtllm_lite.exporter.native.lower import NativeGraph, lower_native
from trtllm_lite.exporter.passes import add_storage_casts, drop_unused_weights, external_weights
from trtllm_lite.exporter.quantize.formats import FORMATS, NONE
from trtllm_lite.exporter.quantize.plan import FormatPlan, plan_dequantized, plan_formats
from trtllm_lite.exporter.quantize.rewrite import find_linears, quantize_graph
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.kv_dtype import KVDtype
from trtllm_lite.runtime.native_table import PLAIN_CACHE


@dataclass(frozen=True)
class FormatSize:
    """What one format stores: weights, their elements, bytes of all their parts."""

    format: str
    weights: int
    elements: int
    nbytes: int

    @property
    def bytes_per_weight(self) -> float:
        return self.nbytes / max(1, self.elements)


@dataclass(frozen=True)
class Prepared:
    """Graphs over stored tensors that have no place yet; `counts` are the passes', by phase.
    `native`: the same over our own kernels, where the formats allow; `kv_dtypes`: the caches that
    it is written with, first the one that the bundle is made for."""

    graphs: Graphs
    plan: FormatPlan
    stored: tuple[Stored, ...]
    native: NativeGraph | None = None
    kv_dtypes: tuple[KVDtype, ...] = (PLAIN_CACHE,)

    @property
    def sizes(self) -> tuple[FormatSize, ...]:
        return format_sizes(self.stored)


def prepare(
    graphs: Graphs,
    quantize: str,
    dtype: str,
    prefill_format: str | None = None,
    keep_int8: Collection[str] = (),
    kv_dtype: str = PLAIN_CACHE,
) -> Prepared:
    """Rewrite copies of the graphs; `graphs` stays as it is. dtype: of what is not quantized.
    Raises UsageError for a kv_dtype that cannot be had, and where no weight can be quantized."""
    order = list(graphs.weights)
    models = tuple(model.clone() for model in graphs.models)
    if dtype != "float32" and not graphs.target.computes_in_dtype:
        for model in models:
            add_storage_casts(model, IR_DTYPES[dtype])
    weights = find_linears(graphs.models)
    if graphs.target.dequantizes:
        plan = plan_dequantized(quantize, weights, keep_int8)
    else:
        plan = plan_formats(quantize, weights, prefill_format, keep_int8)
    counts, stored = dict(graphs.counts), list[Stored]()
    for spec, model in zip(graphs.specs, models, strict=True):
        computed = dtype if graphs.target.computes_in_dtype else "float32"
        made, parts = quantize_graph(model, spec.phase, plan, weights, computed)
        counts |= {f"{spec.phase}.{name}": count for name, count in made.items()}
        stored += parts
        drop_unused_weights(model)
    if quantize != NONE and not stored:
        raise UsageError(
            f"--quantize {quantize}: blocks divide the inputs of no layer of the model, so nothing "
            "would be quantized; leave it out"
        )
    for model in models:
        for name, rewrite in graphs.target.finish:
            counts[name] = counts.get(name, 0) + rewrite(model)
    coded = {s.name for s in stored}
    left = {n: v for n, v in external_weights(models).items() if n not in coded}
    on_cpu = graphs.target.name == "cpu"
    native = lower_native(graphs.models[-1], plan, weights) if on_cpu and quantize != NONE else None
    if native is not None:
        counts |= {f"native.{name}": count for name, count in native.counts.items()}
    finished = replace(graphs, models=models, counts=counts)
    ordered = tuple(in_order([*stored, *plain(left)], order))
    return Prepared(finished, plan, ordered, native, cache_dtypes(kv_dtype, native))


def format_sizes(stored: Iterable[Stored]) -> tuple[FormatSize, ...]:
    """One entry a format, largest first; plain tensors under their element type."""
    groups: dict[str, list[Stored]] = {}
    for tensor in stored:
        if tensor.same_bytes_as is None:
            groups.setdefault(tensor.recipe.format or tensor.dtype, []).append(tensor)
    made = [_size(name, tensors) for name, tensors in groups.items()]
    return tuple(sorted(made, key=lambda size: -size.nbytes))


def _size(name: str, tensors: list[Stored]) -> FormatSize:
    first = [t for t in tensors if name not in FORMATS or t.part == FORMATS[name].parts[0].suffix]
    elements = sum(_elements(t) for t in first)
    return FormatSize(name, len(first), elements, sum(t.nbytes for t in tensors))


def _elements(tensor: Stored) -> int:
    count = 1
    for dim in tensor.recipe.shape or tensor.shape:
        count *= dim
    return count
