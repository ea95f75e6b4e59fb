"""Which graph of a bundle runs a batch, where prefill sees the tokens of its own run alone.

A batch says what it is for, prefill or decode. Bundles with an extend graph are run by what a batch
needs: a prefill graph that reads nothing of the cache, a decode graph of one token a row, and the
extend graph for all else. Other bundles have one graph for each of the two.
"""

from collections.abc import Collection

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.manifest import Manifest, Phase


def has_extend(manifest: Manifest) -> bool:
    return any(graph.phase == "extend" for graph in manifest.graphs)


def takes_several_tokens(manifest: Manifest) -> bool:
    """Whether a decode batch may hold several tokens a row, to verify guessed ones."""
    return has_extend(manifest) or manifest.graph("decode").is_multi_token


def graphs_to_open(manifest: Manifest, phases: Collection[Phase]) -> tuple[Phase, ...]:
    """The graphs that batches of these phases may need."""
    wanted = set(phases) | ({"extend"} if has_extend(manifest) else set())
    return tuple(graph.phase for graph in manifest.graphs if graph.phase in wanted)


def graph_for(batch: Batch, available: Collection[Phase]) -> Phase:
    """The graph that computes the batch, of those that a session has opened. It is not among them
    where the session was not opened for such batches."""
    if "extend" not in available:
        return batch.phase
    if "prefill" in available and not batch.past_lens.any():
        return "prefill"
    one = batch.token_ids.shape[1] == 1 and batch.logits_indices.shape[1] == 1
    return "decode" if one and "decode" in available else "extend"
