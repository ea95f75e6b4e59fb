"""Which values a float16 graph keeps in float32.

Some models, Gemma 3 among them, carry values of several 100,000 from layer to layer, which float16
(up to 65,504) makes infinite. The graphs are computed in float32 on a few texts, and what comes
near the end of float16's range is listed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trtllm_lite.exporter.passes.islands import REACH
from trtllm_lite.exporter.rounded.graph import FLOAT, HALF, in_float32
from trtllm_lite.exporter.scout.runs import GraphRun
from trtllm_lite.runtime.errors import UnsupportedError
from trtllm_lite.runtime.manifest import GraphSpec, KVSpec
from trtllm_lite.runtime.progress import Progress

MARGIN = 2
"""Other texts may reach so many times what these did."""
LIMIT = float(np.finfo(np.float16).max) / MARGIN
SHORT = 8
"""Tokens of the one prompt that graphs after the first compute. Most of their values are those of
the first; outliers are largest at the first tokens of a text."""
_WATCHED = "magnitude."

Prompts = Sequence[Sequence[int]]
Magnitudes = Mapping[str, float]


@dataclass(frozen=True)
class PhaseGraph:
    """A float16 graph that is bound to its weights, and its table."""

    spec: GraphSpec
    model: ir.Model


def find_islands(
    graphs: Iterable[PhaseGraph],
    kv: KVSpec,
    folder: Path,
    prompts: Prompts,
    progress: Progress,
    limit: float = LIMIT,
) -> frozenset[str]:
    """Names of the values whose largest magnitude, over all prompts and graphs, is beyond `limit`.

    folder: where the weights lie. The same name in two graphs is the same value, or harmlessly
    taken for it. Raises UnsupportedError for what an island does not help with: keys or values
    beyond the limit, which are cached in float16, and values that even a scaled product cannot
    take.
    """
    largest: dict[str, float] = {}
    for graph, own in _shared_out(graphs, prompts):
        for name, value in magnitudes(graph, kv, folder, own, progress).items():
            largest[name] = max(value, largest.get(name, 0.0))
        _refuse_wide_caches(graph.spec, largest, limit)
    names = frozenset(name for name, value in largest.items() if not value <= limit)
    for name in sorted(names):
        if not largest[name] <= limit * REACH:
            raise _too_wide(f"{name} reaches {largest[name]:.3g}")
    return names


def magnitudes(
    graph: PhaseGraph, kv: KVSpec, folder: Path, prompts: Prompts, progress: Progress
) -> dict[str, float]:
    """The largest magnitude of each float16 value that depends on the graph's inputs, computed in
    float32. NaN counts as infinite."""
    model = in_float32(graph.model)
    watched = _watch(model, _half_values(graph.model))
    run = GraphRun(model, graph.spec, kv, folder)
    largest = dict.fromkeys(watched.values(), 0.0)
    for done, prompt in enumerate(prompts):
        for results in run.prompt(prompt):
            for output, name in watched.items():
                value = float(results[output])
                largest[name] = max(largest[name], value if value == value else np.inf)
        progress.advance(done + 1, len(prompts), f"prompts ({graph.spec.phase})")
    return largest


def overflows(
    graphs: Iterable[PhaseGraph], kv: KVSpec, folder: Path, prompts: Prompts
) -> tuple[str, ...]:
    """Phases whose logits are not finite on these prompts when every float16 value is rounded to
    float16, as on a GPU."""
    return tuple(
        graph.spec.phase
        for graph, own in _shared_out(graphs, prompts)
        if not all(np.isfinite(logits).all() for logits in rounded_logits(graph, kv, folder, own))
    )


def rounded_logits(
    graph: PhaseGraph, kv: KVSpec, folder: Path, prompts: Prompts
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Logits of each prompt [tokens, vocab], float16 where the graph is: of its first and last
    tokens, or of the last one where the graph takes one token a row."""
    run = GraphRun(in_float32(graph.model, rounded=True), graph.spec, kv, folder)
    (output,) = graph.spec.by_role("logits")
    return [list(run.prompt(prompt))[-1][output.name][0] for prompt in prompts]


def _shared_out(
    graphs: Iterable[PhaseGraph], prompts: Prompts
) -> Iterator[tuple[PhaseGraph, Prompts]]:
    """The first graph computes all prompts, the others the beginning of one."""
    for index, graph in enumerate(graphs):
        yield graph, prompts if index == 0 else [list(prompts[0][:SHORT])]


def _half_values(model: ir.Model) -> list[str]:
    """Names of the float16 values that nodes make of something that is not constant."""
    dynamic = set(model.graph.inputs)
    found = []
    for node in model.graph:
        if any(value in dynamic for value in node.inputs):
            dynamic.update(node.outputs)
            found += [str(v.name) for v in node.outputs if v.dtype == HALF and v.name]
    return found


def _watch(model: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Let the graph tell the largest magnitude of these values; output name -> value name."""
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    watched = {}
    for index, name in enumerate(names):
        absolute = ir.node("Abs", [values[name]])
        largest = ir.node("ReduceMax", [absolute.outputs[0]], {"keepdims": 0})
        node = values[name].producer()
        assert node is not None
        graph.insert_after(node, [absolute, largest])
        output = largest.outputs[0]
        output.name = f"{_WATCHED}{index}"
        output.type, output.shape = ir.TensorType(FLOAT), ir.Shape([])
        graph.outputs.append(output)
        watched[output.name] = name
    return watched


def _refuse_wide_caches(spec: GraphSpec, largest: Magnitudes, limit: float) -> None:
    for tensor in (*spec.by_role("present_key"), *spec.by_role("present_value")):
        value = largest.get(tensor.name, 0.0)
        if not value <= limit:
            raise _too_wide(f"{tensor.name} in the KV cache reaches {value:.3g}")


def _too_wide(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"a wider type than float16 ({what})",
        f"values up to {LIMIT:.5g} in the cache, {LIMIT * REACH:.3g} elsewhere",
        "export with --dtype bfloat16",
    )
