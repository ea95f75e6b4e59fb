"""A checkpoint's configuration -> what its bundle will weigh and ask of a machine.

Goes the way of `export` as far as the graphs, with fake parameters: no weight is read, and none has
to be there. A few of the layers are traced, and the others counted (`outline_layers`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir

from trtllm_lite.exporter.capabilities import refuse_unsupported
from trtllm_lite.exporter.checkpoint import open_config
from trtllm_lite.exporter.contract import kv_spec
from trtllm_lite.exporter.external_data import ALIGNMENT, Stored
from trtllm_lite.exporter.graft import AttentionFacts
from trtllm_lite.exporter.graphs import Graphs, build_graphs, grafted, graph_specs
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.native.lower import NativeGraph
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.outline_layers import find_layers, is_like, sample
from trtllm_lite.exporter.passes import external_weights
from trtllm_lite.exporter.pipeline import longest_sequence
from trtllm_lite.exporter.quantize.apply import Prepared, prepare
from trtllm_lite.exporter.quantize.plan import Linear
from trtllm_lite.exporter.quantize.rewrite import find_linears
from trtllm_lite.runtime.manifest import GraphSpec, KVSpec
from trtllm_lite.runtime.planning.memory import GraphWeights
from trtllm_lite.runtime.planning.workload import Workload
from trtllm_lite.runtime.progress import Progress

ROTARY = "rotary."
"""Begins the names of tables of which a token reads one row."""


@dataclass(frozen=True)
class Outline:
    """What a bundle would be. `workload`: of the graphs over ONNX Runtime's or TensorRT's
    operators; `native`: of those over our own kernels, where there are some. weights: of the
    graphs, whose tables are `graphs`. widest: the largest output of a product but the logits.
    calibrated: a calibration text would choose weights that stay in 8 bits, which are not
    counted."""

    model_type: str
    num_parameters: int
    hidden_size: int
    max_model_len: int
    target: str
    dtype: str
    quantize: str
    workload: Workload
    native: Workload | None
    weights: GraphWeights
    graphs: tuple[GraphSpec, ...]
    largest_tensor_bytes: int
    query_width: int
    widest: int
    calibrated: bool


@dataclass(frozen=True)
class _Model:
    """The graphs of some layers, and what is known of all. times: how many weights of the whole
    model a weight of the graphs stands for, by its name."""

    graphs: Graphs
    facts: tuple[AttentionFacts, ...]
    num_parameters: int
    times: Callable[[str], int]

    @property
    def kv(self) -> KVSpec:
        return kv_spec(list(self.facts), self.graphs.kv.dtype, self.graphs.kv.recompute_at)


def outline(options: ExportOptions, progress: Progress) -> Outline:
    """Outline the bundle that `options` ask for. Raises what `export` raises before it writes."""
    progress.step("read the configuration")
    config = open_config(options.model, options.revision, progress)
    refuse_unsupported(config)
    longest = longest_sequence(config, options.max_model_len)
    model = _model(config, options, longest, progress)
    prepared = prepare(
        model.graphs,
        options.quantize,
        options.dtype,
        options.prefill_format,
        kv_dtype=options.kv_dtype,
    )
    linears = find_linears(model.graphs.models)
    return Outline(
        model_type=config.model_type,
        num_parameters=model.num_parameters,
        hidden_size=config.hidden_size,
        max_model_len=longest,
        target=options.target,
        dtype=options.dtype,
        quantize=options.quantize,
        workload=_workload(model, prepared, linears),
        native=_native(model, prepared, linears),
        weights=_weights(model, prepared),
        graphs=_tables(model),
        largest_tensor_bytes=max(tensor.nbytes for tensor in prepared.stored),
        query_width=max(fact.num_heads * fact.head_dim for fact in model.facts),
        widest=max(w.rows for w in linears if w.is_linear and not w.is_head),
        calibrated=options.quantize != "none" and options.target == "cpu",
    )


def _model(config: Any, options: ExportOptions, longest: int, progress: Progress) -> _Model:
    """The graphs of a sample of the layers where one is like the whole, else those of all."""
    target = find_target(options.target, options.attention)
    progress.step("look at all layers")
    skeleton, facts, _ = grafted(config, longest)
    layers = find_layers(config, skeleton, facts)
    some = None if layers is None else sample(config, layers)
    if layers is not None and some is not None:
        graphs = build_graphs(some.config, target, longest, progress, options.dtype)
        if is_like(find_layers(some.config, graphs.skeleton, graphs.facts), layers, some.picks):
            size = sum(p.numel() for p in skeleton.model.parameters())
            return _Model(graphs, tuple(facts), size, some.times)
    graphs = build_graphs(config, target, longest, progress, options.dtype)
    return _Model(graphs, graphs.facts, graphs.num_parameters, lambda _name: 1)


def _workload(model: _Model, prepared: Prepared, linears: Iterable[Linear]) -> Workload:
    decode = next(
        graph
        for spec, graph in zip(prepared.graphs.specs, prepared.graphs.models, strict=True)
        if spec.phase == "decode"
    )
    looked_up = {w.name for w in linears if not w.is_linear}
    step = sum(
        tensor.nbytes * model.times(tensor.name)
        for tensor in _read_by(decode, prepared)
        if tensor.recipe.source not in looked_up and not tensor.name.startswith(ROTARY)
    )
    apart = [tensor for tensor in prepared.stored if tensor.same_bytes_as is None]
    size = _file_bytes((tensor.nbytes, model.times(tensor.name)) for tensor in apart)
    return _made(model, linears, model.kv, size, step)


def _native(model: _Model, prepared: Prepared, linears: Iterable[Linear]) -> Workload | None:
    if prepared.native is None:
        return None
    kv = KVSpec(prepared.kv_dtypes[0], model.kv.layers)
    size, step = _packed(model, prepared.native)
    return _made(model, linears, kv, size, step)


def _made(
    model: _Model, linears: Iterable[Linear], kv: KVSpec, weight_bytes: int, step_bytes: int
) -> Workload:
    products = [w for w in linears if w.is_linear]
    body = (w.rows * w.columns * model.times(w.name) for w in products if not w.is_head)
    return Workload(
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        body_products=sum(body),
        head_products=sum(w.rows * w.columns for w in products if w.is_head),
        vocab_size=model.graphs.skeleton.model.config.vocab_size,
        layers=kv.layers,
        kv_dtype=kv.dtype,
        attention_width=sum(fact.num_heads * fact.head_dim for fact in model.facts),
    )


def _read_by(graph: ir.Model, prepared: Prepared) -> list[Stored]:
    """The stored tensors that a graph reads, each once."""
    stored = {tensor.name: tensor for tensor in prepared.stored}
    read = [stored[name] for name in external_weights((graph,)) if name in stored]
    return list({_place(tensor): tensor for tensor in read}.values())


def _tables(model: _Model) -> tuple[GraphSpec, ...]:
    """Of the graphs of the whole model."""
    vocab_size = model.graphs.skeleton.model.config.vocab_size
    return graph_specs(model.graphs.target, model.kv, vocab_size)


def _weights(model: _Model, prepared: Prepared) -> GraphWeights:
    pairs = zip(prepared.graphs.specs, prepared.graphs.models, strict=True)
    read = {spec.phase: _read_by(graph, prepared) for spec, graph in pairs}
    matrices = {phase: [t for t in tensors if len(t.shape) > 1] for phase, tensors in read.items()}
    vectors = {phase: [t for t in tensors if len(t.shape) < 2] for phase, tensors in read.items()}
    once = {_place(tensor): tensor for tensors in matrices.values() for tensor in tensors}

    def size(tensors: Iterable[Stored]) -> int:
        return sum(tensor.nbytes * model.times(tensor.name) for tensor in tensors)

    return GraphWeights(
        vectors={phase: size(tensors) for phase, tensors in vectors.items()},
        matrices={phase: size(tensors) for phase, tensors in matrices.items()},
        all_matrices=size(once.values()),
    )


def _place(tensor: Stored) -> str:
    return tensor.same_bytes_as or tensor.name


def _packed(model: _Model, native: NativeGraph) -> tuple[int, int]:
    """Bytes of the native data file, and of the packed weights in it, which a step reads."""
    sizes, step = list[tuple[int, int]](), 0
    for name, value in native.model.graph.initializers.items():
        if value.const_value is not None:
            continue
        assert value.shape is not None
        assert value.dtype is not None
        length = prod((value.dtype.bitwidth // 8, *map(int, value.shape.numpy())))
        sizes.append((length, model.times(name)))
        step += length * model.times(name) if name.rpartition(".")[0] in native.packings else 0
    return _file_bytes(sizes), step


def _file_bytes(tensors: Iterable[tuple[int, int]]) -> int:
    """Size of a file of tensors, (length, how often) in order: each begins at a multiple of
    ALIGNMENT, and the last of them ends it."""
    end = last = 0
    for length, times in tensors:
        last = -(-length // ALIGNMENT) * ALIGNMENT - length
        end += (length + last) * times
    return end - last
