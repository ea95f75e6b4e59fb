"""A checkpoint's configuration -> what its bundle will weigh and ask of a machine.

Goes the way of `export` as far as the graphs, with fake parameters: no weight is read, and none has
to be there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from trtllm_lite.exporter.capabilities import refuse_unsupported
from trtllm_lite.exporter.checkpoint import open_config
from trtllm_lite.exporter.external_data import ALIGNMENT, Stored, layout
from trtllm_lite.exporter.graphs import Graphs, build_graphs
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.native.lower import NativeGraph
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.passes import external_weights
from trtllm_lite.exporter.pipeline import longest_sequence
from trtllm_lite.exporter.quantize.apply import Prepared, prepare
from trtllm_lite.exporter.quantize.plan import Linear
from trtllm_lite.exporter.quantize.rewrite import find_linears
from trtllm_lite.runtime.manifest import KVSpec
from trtllm_lite.runtime.planning.workload import Workload
from trtllm_lite.runtime.progress import Progress

ROTARY = "rotary."
"""Begins the names of tables of which a token reads one row."""


@dataclass(frozen=True)
class Outline:
    """What a bundle would be. `workload`: of the graphs over ONNX Runtime's or TensorRT's
    operators; `native`: of those over our own kernels, where there are some. phase_bytes: weights
    of each graph. widest: the largest output of a product but the logits. calibrated: a calibration
    text would choose weights that stay in 8 bits, which are not counted."""

    model_type: str
    num_parameters: int
    hidden_size: int
    max_model_len: int
    target: str
    dtype: str
    quantize: str
    workload: Workload
    native: Workload | None
    phase_bytes: Mapping[str, int]
    largest_tensor_bytes: int
    query_width: int
    widest: int
    calibrated: bool


def outline(options: ExportOptions, progress: Progress) -> Outline:
    """Outline the bundle that `options` ask for. Raises what `export` raises before it writes."""
    progress.step("read the configuration")
    config = open_config(options.model, options.revision, progress)
    refuse_unsupported(config)
    longest = longest_sequence(config, options.max_model_len)
    graphs = build_graphs(config, find_target(options.target), longest, progress, options.dtype)
    prepared = prepare(
        graphs,
        options.quantize,
        options.dtype,
        options.prefill_format,
        kv_dtype=options.kv_dtype,
    )
    linears = find_linears(graphs.models)
    stored = {tensor.name: tensor for tensor in prepared.stored}
    return Outline(
        model_type=config.model_type,
        num_parameters=graphs.num_parameters,
        hidden_size=config.hidden_size,
        max_model_len=longest,
        target=options.target,
        dtype=options.dtype,
        quantize=options.quantize,
        workload=_workload(graphs, prepared, linears),
        native=_native(graphs, prepared, linears),
        phase_bytes=_phase_bytes(prepared, stored),
        largest_tensor_bytes=max(tensor.nbytes for tensor in prepared.stored),
        query_width=max(fact.num_heads * fact.head_dim for fact in graphs.facts),
        widest=max(w.rows for w in linears if w.is_linear and not w.is_head),
        calibrated=options.quantize != "none" and options.target == "cpu",
    )


def _workload(graphs: Graphs, prepared: Prepared, linears: Iterable[Linear]) -> Workload:
    decode = next(
        model
        for spec, model in zip(graphs.specs, prepared.graphs.models, strict=True)
        if spec.phase == "decode"
    )
    looked_up = {w.name for w in linears if not w.is_linear}
    read = _read_by(decode, {tensor.name: tensor for tensor in prepared.stored})
    step = sum(
        tensor.nbytes
        for tensor in read
        if tensor.recipe.source not in looked_up and not tensor.name.startswith(ROTARY)
    )
    return _made(graphs, linears, graphs.kv, layout(prepared.stored)[1], step)


def _native(graphs: Graphs, prepared: Prepared, linears: Iterable[Linear]) -> Workload | None:
    if prepared.native is None:
        return None
    kv = KVSpec(prepared.kv_dtypes[0], graphs.kv.layers)
    size, step = _packed(prepared.native)
    return _made(graphs, linears, kv, size, step)


def _made(
    graphs: Graphs, linears: Iterable[Linear], kv: KVSpec, weight_bytes: int, step_bytes: int
) -> Workload:
    products = [w for w in linears if w.is_linear]
    return Workload(
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        body_products=sum(w.rows * w.columns for w in products if not w.is_head),
        head_products=sum(w.rows * w.columns for w in products if w.is_head),
        vocab_size=graphs.skeleton.model.config.vocab_size,
        layers=kv.layers,
        kv_dtype=kv.dtype,
        attention_width=sum(fact.num_heads * fact.head_dim for fact in graphs.facts),
    )


def _read_by(model: ir.Model, stored: Mapping[str, Stored]) -> list[Stored]:
    """The stored tensors that a graph reads, each once."""
    read = [stored[name] for name in external_weights((model,)) if name in stored]
    return list({tensor.same_bytes_as or tensor.name: tensor for tensor in read}.values())


def _phase_bytes(prepared: Prepared, stored: Mapping[str, Stored]) -> dict[str, int]:
    pairs = zip(prepared.graphs.specs, prepared.graphs.models, strict=True)
    return {
        str(spec.phase): sum(tensor.nbytes for tensor in _read_by(model, stored))
        for spec, model in pairs
    }


def _packed(native: NativeGraph) -> tuple[int, int]:
    """Bytes of the native data file, and of the packed weights in it, which a step reads."""
    end = step = 0
    for name, value in native.model.graph.initializers.items():
        if value.const_value is not None:
            continue
        assert value.shape is not None
        assert value.dtype is not None
        length = value.dtype.bitwidth // 8
        for dim in value.shape.numpy():
            length *= int(dim)
        end = -(-end // ALIGNMENT) * ALIGNMENT + length
        step += length if name.rpartition(".")[0] in native.packings else 0
    return end, step
