"""A checkpoint's configuration -> the finished graphs, with no weight read."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trtllm_lite.exporter.arrangement import Arrangement
from trtllm_lite.exporter.contract import graph_spec, kv_spec
from trtllm_lite.exporter.graft import PROBE, AttentionFacts, probe
from trtllm_lite.exporter.lowering import Target
from trtllm_lite.exporter.passes import (
    compute_in,
    drop_trace_notes,
    drop_unused_weights,
    external_weights,
    fold_constants,
    fold_offsets,
    take_tables,
    weight_arrangements,
    weight_offset,
    weight_parts,
)
from trtllm_lite.exporter.skeleton import Skeleton, build_skeleton
from trtllm_lite.exporter.trace import quiet, trace
from trtllm_lite.exporter.wrapper import SelectRows
from trtllm_lite.models.longrope import graft_longrope
from trtllm_lite.runtime.errors import TrtllmLiteError, UnsupportedError
from trtllm_lite.runtime.manifest import GraphSpec, KVSpec
from trtllm_lite.runtime.progress import Progress

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Graphs:
    """The graphs, their specifications, the cache contract, what they are lowered for, and the
    model's skeleton.

    tables: weights of the graphs that are no parameter of the model, float32, with their numbers.
    """

    skeleton: Skeleton
    facts: tuple[AttentionFacts, ...]
    kv: KVSpec
    specs: tuple[GraphSpec, ...]
    models: tuple[ir.Model, ...]
    counts: dict[str, int]
    target: Target
    tables: dict[str, Array] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, ir.Value]:
        """What the graphs keep in the weights file, in the order of first use."""
        return external_weights(self.models)

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The parameters that each weight is made of, one after the other along its rows."""
        found = self.weights.items()
        return {name: weight_parts(v) for name, v in found if name not in self.tables}

    @property
    def offsets(self) -> dict[str, float]:
        """What is added to the parameters of a weight, where that is not zero."""
        found = {name: weight_offset(value) for name, value in self.weights.items()}
        return {name: offset for name, offset in found.items() if offset}

    @property
    def arrangements(self) -> dict[str, Arrangement]:
        """Of the parameters whose elements stand in another order in their weight."""
        found = self.weights.values()
        return {n: a for value in found for n, a in weight_arrangements(value).items()}

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(p.numel() for p in self.skeleton.model.parameters())


def truncated(config: Any, num_layers: int | None) -> Any:
    """The configuration with only its first layers."""
    if num_layers is None:
        return config
    short = copy.deepcopy(config)
    short.num_hidden_layers = num_layers
    if getattr(short, "layer_types", None):
        short.layer_types = short.layer_types[:num_layers]
    return short


def build_graphs(
    config: Any,
    target: Target,
    max_model_len: int,
    progress: Progress,
    dtype: str = "float32",
) -> Graphs:
    """Graft, trace, lower. Raises UnsupportedError naming what is not supported.

    dtype: what the weights are going to be stored in. Where the arithmetic is float32 all the same,
    1 + w is not what the reference computes from a rounded w, and stays a node.
    """
    progress.step("probe the model")
    skeleton, facts, recompute_at = grafted(config, max_model_len)
    kv = kv_spec(facts, "float32", recompute_at)
    progress.step("trace")
    model = trace(skeleton, facts, graph_spec("prefill", kv, config.vocab_size), target)
    progress.step("lower")
    counts = _lower(model, target, max_model_len)
    if dtype == "float32" or target.computes_in_dtype:
        counts["fold_offsets"] = fold_offsets(model)
    tables = take_tables(model)
    if dtype != "float32" and target.computes_in_dtype:
        counts["compute_in"] = compute_in(model, dtype)
        kv = replace(kv, dtype=dtype)
    specs = graph_specs(target, kv, config.vocab_size)
    models = tuple(_of_phase(model.clone(), spec, target, counts) for spec in specs)
    return Graphs(skeleton, tuple(facts), kv, specs, models, counts, target, tables)


def graph_specs(target: Target, kv: KVSpec, vocab_size: int) -> tuple[GraphSpec, ...]:
    """The tables of a target's graphs."""
    one = target.one_token_decode
    return tuple(
        graph_spec(
            phase,
            kv,
            vocab_size,
            multi_token=not (one and phase == "decode"),
            more=target.more_inputs,
            more_outputs=target.more_outputs,
        )
        for phase in target.phases
    )


def _of_phase(model: ir.Model, spec: GraphSpec, target: Target, counts: dict[str, int]) -> ir.Model:
    """The traced graph as that of one table; phases without passes of their own compute the same,
    and differ in the formats of their weights."""
    model.graph.name = spec.phase
    for name, rewrite in target.phase_passes(spec):
        counts[f"{spec.phase}.{name}"] = rewrite(model)
    drop_unused_weights(model)
    return model


def grafted(config: Any, max_model_len: int) -> tuple[Skeleton, list[AttentionFacts], int | None]:
    """A model with no weight in memory, what its attention calls need, and the context length from
    which on its cache is another, if there is one. Raises UnsupportedError."""
    try:
        with quiet():
            skeleton = build_skeleton(config, PROBE)
        head = skeleton.model.get_output_embeddings()
        recompute_at = graft_longrope(skeleton.model, max_model_len)
        with quiet():
            facts = probe(skeleton)
    except TrtllmLiteError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedError(
            f"modelling code that cannot be traced ({config.model_type}: "
            f"{type(error).__name__}: {first})",
            "models whose attention goes through transformers' AttentionInterface",
            "see `trtllm-lite families`",
        ) from error
    if head is None:
        raise UnsupportedError(
            "an output layer that transformers does not name", "causal language models", "none"
        )
    skeleton.model.set_output_embeddings(SelectRows(head))
    return skeleton, facts, recompute_at


def _lower(model: ir.Model, target: Target, max_model_len: int) -> dict[str, int]:
    """Rewrite in place, and return the count of each pass."""
    counts = {"fold_constants": fold_constants(model)}
    for name, rewrite in target.passes(max_model_len):
        count = rewrite(model)
        if not count and name in target.required:
            raise AssertionError(f"pass {name} found nothing to change")
        counts[name] = count
    drop_unused_weights(model)
    drop_trace_notes(model)
    return counts
