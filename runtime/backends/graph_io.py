"""A graph's I/O table, read by role, and the checks that keep a backend from trusting it.

Nothing here knows which library runs the graph: a backend hands in what its library reports.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from trtllm_lite.runtime.backends.base import Array, Batch
from trtllm_lite.runtime.backends.kv_pool import NUMPY_DTYPES
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.graph_check import check_graphs
from trtllm_lite.runtime.manifest import GraphSpec, Manifest, Phase, Role, TensorSpec

_TOKEN_ROLES: tuple[Role, ...] = (
    "input_ids",
    "past_lens",
    "query_lens",
    "context_lens",
    "max_total_len",
    "logits_indices",
)


_CACHE_ROLES: tuple[Role, ...] = ("past_key", "past_value", "present_key", "present_value")


@dataclass(frozen=True)
class ActualTensor:
    """An input or output as the library that loaded the graph reports it. A dimension that is not
    fixed is a name or None."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class GraphIO:
    """The tensors of one graph by role. `tokens` are the small inputs in table order; the cache
    tensors are in layer order."""

    field: str
    phase: Phase
    tokens: tuple[TensorSpec, ...]
    logits: TensorSpec
    past_keys: tuple[TensorSpec, ...]
    past_values: tuple[TensorSpec, ...]
    present_keys: tuple[TensorSpec, ...]
    present_values: tuple[TensorSpec, ...]
    top: tuple[TensorSpec, ...] = ()
    """The largest logits and their tokens, where the graph gives them."""

    @property
    def cache(self) -> list[tuple[TensorSpec, TensorSpec]]:
        """Past and present of each layer: all keys, then all values."""
        return [
            *zip(self.past_keys, self.present_keys, strict=True),
            *zip(self.past_values, self.present_values, strict=True),
        ]


def graph_io(manifest: Manifest, phase: Phase) -> GraphIO:
    """The table of one graph. Raises BundleError where it does not say what the contract needs."""
    check_graphs(manifest)
    if manifest.kv.layout != "slots":
        raise BundleError("kv.layout", f"{manifest.kv.layout!r} is not supported; allowed: 'slots'")
    graph = manifest.graph(phase)
    return GraphIO(
        field=f"graphs[{manifest.graphs.index(graph)}]",
        phase=phase,
        tokens=tuple(t for t in graph.inputs if t.role in _TOKEN_ROLES),
        logits=graph.by_role("logits")[0],
        past_keys=_in_layer_order(graph, "past_key"),
        past_values=_in_layer_order(graph, "past_value"),
        present_keys=_in_layer_order(graph, "present_key"),
        present_values=_in_layer_order(graph, "present_value"),
        top=(*graph.by_role("top_logits"), *graph.by_role("top_ids")),
    )


def with_cache_dtype(manifest: Manifest, dtype: str) -> Manifest:
    """The manifest of graphs that differ from these in the element type of their cache alone."""

    def retyped(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(replace(t, dtype=dtype) if t.role in _CACHE_ROLES else t for t in tensors)

    graphs = tuple(
        replace(g, inputs=retyped(g.inputs), outputs=retyped(g.outputs)) for g in manifest.graphs
    )
    return replace(manifest, kv=replace(manifest.kv, dtype=dtype), graphs=graphs)


def check_actual(field: str, table: Iterable[TensorSpec], actual: Iterable[ActualTensor]) -> None:
    """Raise BundleError unless the loaded graph has exactly the tensors of the table: names,
    types, ranks and fixed dimensions. `field` is the table's place in the manifest."""
    expected = {t.name: t for t in table}
    reported = {t.name: t for t in actual}
    for name in sorted(expected.keys() ^ reported.keys()):
        where = "the graph lacks it" if name in expected else "the table lacks it"
        raise BundleError(field, f"{name!r} is not in both graph and table: {where}")
    for name, spec in expected.items():
        got = reported[name]
        if got.dtype != spec.dtype:
            raise BundleError(
                field, f"{name!r} is {got.dtype} in the graph, {spec.dtype} in bundle.json"
            )
        if _fixed(got.shape) != _fixed(spec.shape):
            raise BundleError(
                field,
                f"{name!r} is {list(got.shape)} in the graph, {list(spec.shape)} in bundle.json",
            )


def token_inputs(batch: Batch) -> dict[Role, Array]:
    """The small inputs of a batch by role; a graph takes those that its table has."""
    return {
        "input_ids": batch.token_ids,
        "past_lens": batch.past_lens,
        "query_lens": batch.query_lens,
        "context_lens": batch.context_lens,
        "logits_indices": batch.logits_indices,
    }


def token_arrays(specs: Iterable[TensorSpec], batch: Batch) -> dict[str, Array]:
    """The small inputs of a batch by name, each with the dtype of its table and in one piece."""
    given = token_inputs(batch)
    return {
        spec.name: np.ascontiguousarray(given[spec.role], NUMPY_DTYPES[spec.dtype])
        for spec in specs
    }


def _in_layer_order(graph: GraphSpec, role: Role) -> tuple[TensorSpec, ...]:
    return tuple(sorted(graph.by_role(role), key=lambda t: -1 if t.layer is None else t.layer))


def _fixed(shape: tuple[int | str | None, ...]) -> tuple[int | None, ...]:
    return tuple(d if isinstance(d, int) else None for d in shape)
