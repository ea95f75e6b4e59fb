"""A checkpoint's configuration -> the two finished graphs, with no weight read."""

import copy
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from trtllm_lite.exporter.contract import graph_spec, kv_spec
from trtllm_lite.exporter.graft import PROBE, AttentionFacts, probe
from trtllm_lite.exporter.lowering import Target
from trtllm_lite.exporter.passes import (
    drop_trace_notes,
    drop_unused_weights,
    external_weights,
    fold_constants,
)
from trtllm_lite.exporter.skeleton import Skeleton, build_skeleton
from trtllm_lite.exporter.trace import quiet, trace
from trtllm_lite.exporter.wrapper import SelectRows
from trtllm_lite.models.longrope import graft_longrope
from trtllm_lite.runtime.errors import TrtllmLiteError, UnsupportedError
from trtllm_lite.runtime.manifest import GraphSpec, KVSpec, Phase
from trtllm_lite.runtime.progress import Progress

PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Graphs:
    """Both graphs, their tables, the cache contract, and the model's skeleton."""

    skeleton: Skeleton
    facts: tuple[AttentionFacts, ...]
    kv: KVSpec
    specs: tuple[GraphSpec, ...]
    models: tuple[ir.Model, ...]
    counts: dict[str, int]

    @property
    def weights(self) -> dict[str, ir.Value]:
        return external_weights(self.models)

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


def build_graphs(config: Any, target: Target, max_model_len: int, progress: Progress) -> Graphs:
    """Graft, trace both phases, lower. Raises UnsupportedError naming what is not supported."""
    progress.step("probe the model")
    skeleton, facts, recompute_at = _graft(config, max_model_len)
    kv = kv_spec(facts, "float32", recompute_at)
    specs = tuple(graph_spec(phase, kv, config.vocab_size) for phase in PHASES)
    counts: dict[str, int] = {}
    models = []
    for spec in specs:
        progress.step(f"trace {spec.phase}")
        model = trace(skeleton, facts, spec, target)
        progress.step(f"lower {spec.phase}")
        _lower(model, target, spec.phase, counts)
        models.append(model)
    return Graphs(skeleton, tuple(facts), kv, specs, tuple(models), counts)


def _graft(config: Any, max_model_len: int) -> tuple[Skeleton, list[AttentionFacts], int | None]:
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


def _lower(model: ir.Model, target: Target, phase: str, counts: dict[str, int]) -> None:
    counts[f"{phase}.fold_constants"] = fold_constants(model)
    for name, rewrite in target.passes:
        count = rewrite(model)
        if not count and name in target.required:
            raise AssertionError(f"pass {name} found nothing to change in {phase}")
        counts[f"{phase}.{name}"] = count
    drop_unused_weights(model)
    drop_trace_notes(model)
