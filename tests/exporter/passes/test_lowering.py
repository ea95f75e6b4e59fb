"""The cpu target's passes, all of them, on a graph that was traced."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import pytest

from trtllm_lite.exporter import graphs
from trtllm_lite.exporter.graphs import Graphs
from trtllm_lite.exporter.lowering import find_target
from trtllm_lite.exporter.passes import scopes

Make = Callable[..., ir.Model]


def blind() -> Callable[[int], tuple[tuple[str, Callable[[Any], int]], ...]]:
    names = [name for name, _ in find_target("cpu").passes(1)]
    return lambda _length: tuple((name, lambda _model: 0) for name in names)


def test_a_llama_is_ten_nodes_a_layer(fresh_graphs: Callable[[], Graphs]) -> None:
    made = fresh_graphs()
    layers = len(made.facts)
    for lowered in made.models:
        assert Counter(node.op_type for node in lowered.graph) == {
            "Gather": 1,
            # Row lengths: past and new tokens, their maximum, the last position.
            "Add": 1,
            "ReduceMax": 1,
            "Sub": 1,
            "RMSNormalization": 1,
            "FusedMatMul": 4 * layers + 1,
            "GroupQueryAttention": layers,
            "SkipSimplifiedLayerNormalization": 2 * layers,
            "Split": layers,
            "QuickGelu": layers,
            "Mul": layers,
            "Unsqueeze": 1,
            "GatherND": 2,
        }


def test_counts_of_a_llama(fresh_graphs: Callable[[], Graphs]) -> None:
    made = fresh_graphs()
    layers = len(made.facts)
    counted = {name: n for name, n in made.counts.items() if name != "fold_constants"}
    assert counted == {
        "fuse_linear": 7 * layers + 1,
        "widen_rows": 0,
        "turn_weights": 0,
        "fuse_rms_norm": 2 * layers + 1,
        "fuse_layer_norm": 0,
        "pack_projections": 2 * layers,
        "fold_rotary": layers,
        "fuse_rotary": 0,
        "split_slices": 0,
        "regroup_heads": 0,
        # Heads apart and joined again: two each for queries and keys, one for values and result.
        "simplify_layouts": 6 * layers,
        "fold_scale": 0,
        "pack_attention": layers,
        "fuse_skip_norm": 2 * layers,
        "fuse_activation": layers,
        "pick_tokens": 1,
        # All after the last attention: output, norm, the feed-forward part, the last norm.
        "hoist_tokens": 8,
        "fold_offsets": 0,
    }


def test_both_phases_are_the_same_graph(fresh_graphs: Callable[[], Graphs]) -> None:
    made = fresh_graphs()
    prefill, decode = made.models
    assert [n.op_type for n in prefill.graph] == [n.op_type for n in decode.graph]
    assert (prefill.graph.name, decode.graph.name) == ("prefill", "decode")
    assert made.specs[0].inputs == made.specs[1].inputs
    assert made.specs[0].outputs == made.specs[1].outputs
    assert not {*prefill.graph} & {*decode.graph}


def test_products_are_named_as_their_first_weight(fresh_graphs: Callable[[], Graphs]) -> None:
    made = fresh_graphs()
    names = [n.name for n in made.models[0].graph if n.op_type == "FusedMatMul"]
    assert len(set(names)) == len(names) == 4 * len(made.facts) + 1
    wanted = {name for parts in made.parts.values() for name in parts}
    assert set(names) <= wanted
    for node in made.models[0].graph:
        if node.op_type == "FusedMatMul" and "layers" in str(node.name):
            layer = str(node.name).split(".layers.")[1].split(".")[0]
            assert f"model.layers.{layer}" in " ".join(scopes(node))


def test_rotary_tables_are_as_long_as_a_sequence(fresh_graphs: Callable[[], Graphs]) -> None:
    made = fresh_graphs()
    dim = made.facts[0].head_dim
    assert {t.shape for t in made.tables.values()} == {(128, dim // 2)}
    assert set(made.tables) == set(made.weights) - set(made.parts)


def test_a_required_pass_that_stops_matching_is_an_error(make_graph: Make) -> None:
    target = find_target("cpu")
    assert target.required <= {name for name, _ in target.passes(1)}
    made = make_graph("agraph (float[2] x) => (float[2] y) { y = Neg(x) }")
    with pytest.raises(AssertionError, match="pass simplify_layouts found nothing to change"):
        graphs._lower(made, replace(target, passes=blind()), 1)
    optional = replace(target, passes=blind(), required=frozenset())
    assert graphs._lower(made, optional, 1)["fuse_linear"] == 0
