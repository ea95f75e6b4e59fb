"""The graph tables of a manifest against the contract in `manifest.py` and against its KV spec."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import GraphSpec, Manifest, Phase, TensorSpec
from trtllm_lite.runtime.strict_json import shown

MAX_DIM = 2**31 - 1
NEEDED: tuple[Phase, ...] = ("prefill", "decode")
OPTIONAL: tuple[Phase, ...] = ("extend",)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,255}")
_DIM_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

Dims = tuple[int | str, ...]
Side = Literal["inputs", "outputs"]


@dataclass(frozen=True)
class _Rule:
    """One required tensor: its side, dtype and shape, where a name is a variable that stands for
    the same dimension in every tensor of the graph."""

    side: Side
    dtype: str
    shape: Dims


def check_graphs(manifest: Manifest) -> None:
    """Raises BundleError unless there is one prefill and one decode graph, and at most one extend
    graph, each has exactly the tensors that its phase needs, and their dtypes and shapes agree with
    each other and `kv`."""
    phases = Counter(graph.phase for graph in manifest.graphs)
    for phase in NEEDED:
        if phases[phase] != 1:
            text = f"has {phases[phase]} graphs of phase {phase}; exactly one is needed"
            raise BundleError("graphs", text)
    for phase in OPTIONAL:
        if phases[phase] > 1:
            text = f"has {phases[phase]} graphs of phase {phase}; at most one is allowed"
            raise BundleError("graphs", text)
    shared = [_check_graph(f"graphs[{i}]", g, manifest) for i, g in enumerate(manifest.graphs)]
    for i, other in enumerate(shared):
        if other != shared[0]:
            text = f"KV shapes differ between the graphs: {shared[0]} and {other}"
            raise BundleError(f"graphs[{i}].inputs", text)


def _check_graph(at: str, graph: GraphSpec, manifest: Manifest) -> Dims:
    """Returns the dimensions that the graphs must share: the batch and the capacity of the KV."""
    rules = _rules(graph, manifest)
    dims: dict[str, int | str] = {}
    names: set[str] = set()
    missing = dict.fromkeys(rules)
    for side, tensors in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        for j, tensor in enumerate(tensors):
            where = f"{at}.{side}[{j}]"
            _check_name(where, tensor, names)
            rule = rules.get((tensor.role, tensor.layer))
            if rule is None or rule.side != side:
                raise BundleError(f"{where}.role", _misplaced(graph, tensor, side))
            if (tensor.role, tensor.layer) not in missing:
                text = f"{_title(tensor.role, tensor.layer)} is there twice"
                raise BundleError(f"{where}.role", text)
            del missing[tensor.role, tensor.layer]
            _check_tensor(where, tensor, rule, dims)
    for key in missing:
        text = f"the {graph.phase} graph has no tensor of role {_title(*key)}"
        raise BundleError(f"{at}.{rules[key].side}", text)
    _check_dynamic(at, graph, dims)
    return dims["batch"], dims["capacity"]


def _takes_chunks(graph: GraphSpec) -> bool:
    return graph.phase != "decode" or graph.is_multi_token


def _rules(graph: GraphSpec, manifest: Manifest) -> dict[tuple[str, int | None], _Rule]:
    rules: dict[tuple[str, int | None], _Rule] = {
        ("input_ids", None): _Rule("inputs", "int64", ("batch", "seq")),
        ("past_lens", None): _Rule("inputs", "int32", ("batch",)),
        ("logits", None): _Rule(
            "outputs", "float32", ("batch", "num_logits", manifest.model.vocab_size)
        ),
    }
    if _takes_chunks(graph):
        rules["query_lens", None] = _Rule("inputs", "int32", ("batch",))
        rules["logits_indices", None] = _Rule("inputs", "int64", ("batch", "num_logits"))
    if manifest.kv.recompute_at is not None:
        rules["context_lens", None] = _Rule("inputs", "int32", ("batch",))
    if manifest.target == "cuda":
        rules["max_total_len", None] = _Rule("inputs", "int32", (1,))
        best: Dims = ("batch", "num_logits", "candidates")
        rules["top_logits", None] = _Rule("outputs", "float32", best)
        rules["top_ids", None] = _Rule("outputs", "int64", best)
    for i, layer in enumerate(manifest.kv.layers):
        shape: Dims = ("batch", layer.num_kv_heads, "capacity", layer.head_dim)
        for part in ("key", "value"):
            rules[f"past_{part}", i] = _Rule("inputs", manifest.kv.dtype, shape)
            rules[f"present_{part}", i] = _Rule("outputs", manifest.kv.dtype, shape)
    return rules


def _check_name(at: str, tensor: TensorSpec, seen: set[str]) -> None:
    if not _NAME.fullmatch(tensor.name):
        raise BundleError(f"{at}.name", f"{shown(tensor.name)} is not a tensor name")
    if tensor.name in seen:
        raise BundleError(f"{at}.name", f"{shown(tensor.name)} is there twice in the graph")
    seen.add(tensor.name)


def _check_tensor(at: str, tensor: TensorSpec, rule: _Rule, dims: dict[str, int | str]) -> None:
    if tensor.dtype != rule.dtype:
        text = f"{shown(tensor.dtype)} must be {rule.dtype} for role {tensor.role}"
        raise BundleError(f"{at}.dtype", text)
    if len(tensor.shape) != len(rule.shape):
        text = f"has {len(tensor.shape)} dimensions; role {tensor.role} has {len(rule.shape)}"
        raise BundleError(f"{at}.shape", text)
    for said, wanted in zip(tensor.shape, rule.shape, strict=True):
        _check_dim(f"{at}.shape", said)
        known = dims.setdefault(wanted, said) if isinstance(wanted, str) else wanted
        if said != known:
            text = f"{_dims(tensor.shape)} has {said} where the contract has {wanted} = {known}"
            raise BundleError(f"{at}.shape", text)


def _check_dim(field: str, dim: int | str) -> None:
    if isinstance(dim, str) and not _DIM_NAME.fullmatch(dim):
        raise BundleError(field, f"{shown(dim)} is not a dimension name")
    if isinstance(dim, int) and not 1 <= dim <= MAX_DIM:
        raise BundleError(field, f"{dim} is out of range; allowed: 1 to {MAX_DIM}")


def _check_dynamic(at: str, graph: GraphSpec, dims: dict[str, int | str]) -> None:
    chunks = _takes_chunks(graph)
    for name in ("batch", "seq") if chunks else ("batch",):
        if not isinstance(dims[name], str):
            text = f"{name} is fixed to {dims[name]}; it must be a dimension name"
            raise BundleError(f"{at}.inputs", text)
    if not chunks and isinstance(dims["seq"], int) and dims["seq"] != 1:
        raise BundleError(f"{at}.inputs", f"seq is {dims['seq']}; decode takes one token a row")


def _misplaced(graph: GraphSpec, tensor: TensorSpec, side: str) -> str:
    title = _title(tensor.role, tensor.layer)
    return f"{title} is not among the {side} of the {graph.phase} graph of this model"


def _title(role: str, layer: int | None) -> str:
    return role if layer is None else f"{role} of layer {layer}"


def _dims(shape: Dims) -> str:
    return f"[{', '.join(map(str, shape))}]"
