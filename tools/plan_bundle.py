"""A finished bundle as a workload, from its manifest, its graphs' initializers and its table.

Two things are not in a bundle, and are taken to be as in most models: a token is multiplied with
all parameters but an embedding that is not the output layer as well, and query heads times head
size is the hidden size.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_lite.runtime.native_weights import has_native, read_table
from trtllm_lite.runtime.planning.memory import GraphWeights
from trtllm_lite.runtime.planning.workload import Workload
from trtllm_lite.tools.weights import (
    ROTARY,
    Weight,
    graph_bytes,
    packed_bytes,
    read_weights,
    weight_groups,
)

if TYPE_CHECKING:
    from trtllm_lite.runtime.bundle import Bundle

BLOCK = 128
"""Rows of a quantized weight are filled up to whole blocks, of at most so many values."""


def bundle_workloads(bundle: "Bundle") -> tuple[Workload, Workload | None]:
    """Over the operators that any bundle has, and over our own kernels."""
    manifest = bundle.manifest
    of_phase = {g.phase: read_weights(bundle.folder / g.file) for g in manifest.graphs}
    vocab, hidden = manifest.model.vocab_size, manifest.model.hidden_size
    tied = _tables(of_phase["decode"], vocab, hidden) < 2
    multiplied = manifest.model.num_parameters - (0 if tied else vocab * hidden)
    groups = weight_groups(weight for weights in of_phase.values() for weight in weights)
    step = graph_bytes(bundle.graph_path("decode"))
    plain = Workload(
        weight_bytes=sum(group.nbytes for group in groups),
        step_bytes=step if tied else step - _table_bytes(of_phase["decode"], vocab, hidden),
        body_products=multiplied - vocab * hidden,
        head_products=vocab * hidden,
        vocab_size=vocab,
        layers=manifest.kv.layers,
        kv_dtype=manifest.kv.dtype,
        attention_width=len(manifest.kv.layers) * hidden,
    )
    return plain, _native(bundle, plain)


def graph_weights(bundle: "Bundle") -> GraphWeights:
    """What the graphs name in the weights file."""
    read = {graph.phase: _stored(bundle.folder / graph.file) for graph in bundle.manifest.graphs}
    once = {weight.place: weight for weights in read.values() for weight in weights}
    return GraphWeights(
        vectors={p: sum(w.nbytes for w in ws if len(w.shape) < 2) for p, ws in read.items()},
        matrices={p: sum(w.nbytes for w in ws if len(w.shape) > 1) for p, ws in read.items()},
        all_matrices=sum(w.nbytes for w in once.values() if len(w.shape) > 1),
    )


def widest(bundle: "Bundle") -> int | None:
    """The largest size of a matrix but the vocabulary's; None where graphs have none of two
    dimensions."""
    vocab = bundle.manifest.model.vocab_size
    sizes = (
        max(weight.shape)
        for weight in read_weights(bundle.graph_path("decode"))
        if len(weight.shape) == 2 and vocab not in weight.shape
        if not weight.name.startswith(ROTARY)
    )
    return max(sizes, default=None)


def _stored(graph: Path) -> list[Weight]:
    """The weights of a graph that stand in another file, each place once."""
    return list({w.place: w for w in read_weights(graph) if w.place[0]}.values())


def _native(bundle: "Bundle", plain: Workload) -> Workload | None:
    if not has_native(bundle):
        return None
    table = read_table(bundle)
    return replace(
        plain,
        weight_bytes=table.size,
        step_bytes=packed_bytes(bundle.folder),
        kv_dtype=table.kv_dtypes[0],
    )


def _tables(weights: Iterable[Weight], vocab: int, hidden: int) -> int:
    """How many weights are as large as an embedding: one that is both is there once."""
    return sum(_is_table(w, vocab, hidden) for w in {w.place: w for w in weights}.values())


def _table_bytes(weights: Iterable[Weight], vocab: int, hidden: int) -> int:
    """Bytes of the embedding, which a step reads one row of."""
    return next((w.nbytes for w in weights if _is_table(w, vocab, hidden)), 0)


def _is_table(weight: Weight, vocab: int, hidden: int) -> bool:
    for rows, columns in (
        (weight.shape[:1], weight.shape[1:]),
        (weight.shape[-1:], weight.shape[:-1]),
    ):
        if rows == (vocab,) and hidden <= prod(columns) < hidden + BLOCK and columns:
            return True
    return False
