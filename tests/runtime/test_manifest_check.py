"""What the values of a manifest must satisfy: one impossible value each, named by its field."""

import json
from dataclasses import replace
from typing import Any

import pytest

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import Manifest, TensorSpec
from trtllm_lite.runtime.manifest_io import parse_manifest, render_manifest

Path_ = tuple[str | int, ...]


def document_of(manifest: Manifest) -> Any:
    return json.loads(render_manifest(manifest))


def named(path: Path_) -> str:
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in path).lstrip(".")


def holder(document: Any, path: Path_) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


def refused_field(document: object) -> str:
    with pytest.raises(BundleError) as caught:
        parse_manifest(json.dumps(document).encode())
    assert "\n" not in str(caught.value)
    return caught.value.field


VALUES: list[tuple[Path_, object]] = [
    (("limits", "max_num_seqs"), 0),
    (("limits", "max_num_seqs"), 65537),
    (("limits", "max_model_len"), 0),
    (("limits", "max_model_len"), 2**24 + 1),
    (("model", "num_parameters"), 0),
    (("model", "num_layers"), 4097),
    (("model", "hidden_size"), 2**20 + 1),
    (("model", "vocab_size"), 2**24 + 1),
    (("model", "bos_token_id"), 32),
    (("model", "pad_token_id"), 32),
    (("model", "eos_token_ids", 1), 32),
    (("model", "model_type"), "two words"),
    (("source", "id"), "/home/someone/model"),
    (("source", "id"), "a/b/c"),
    (("source", "id"), "../model"),
    (("source", "id"), "C:\\model"),
    (("source", "id"), ""),
    (("source", "format"), "pickle"),
    (("source", "sha256"), "ABC"),
    (("target",), "no such target"),
    (("dtype",), "float64"),
    (("kv", "dtype"), "int8"),
    (("kv", "layout"), "paged"),
    (("kv", "recompute_at"), 0),
    (("kv", "layers", 0, "num_kv_heads"), 0),
    (("kv", "layers", 0, "num_kv_heads"), 4097),
    (("kv", "layers", 1, "head_dim"), 65537),
    (("kv", "layers", 1, "sliding_window"), 0),
    (("quantization", "decode"), ""),
    (("quantization", "lm_head"), "two words"),
    (("files", 0, "sha256"), "A" * 64),
    (("files", 0, "sha256"), "0" * 63),
    (("graphs", 0, "phase"), "other"),
    (("graphs", 0, "inputs", 0, "role"), "position_ids"),
    (("graphs", 0, "inputs", 0, "role"), "logits"),
    (("graphs", 0, "inputs", 1, "role"), "input_ids"),
    (("graphs", 1, "inputs", 1, "role"), "context_lens"),
    (("graphs", 0, "inputs", 1, "role"), "context_lens"),
    (("graphs", 0, "inputs", 1, "name"), "input_ids"),
    (("graphs", 0, "outputs", 0, "name"), "input_ids"),
    (("graphs", 0, "inputs", 0, "name"), "two words"),
    (("graphs", 0, "inputs", 0, "dtype"), "int32"),
    (("graphs", 0, "inputs", 1, "dtype"), "int64"),
    (("graphs", 0, "outputs", 0, "dtype"), "float16"),
    (("graphs", 0, "inputs", 4, "dtype"), "float16"),
    (("graphs", 0, "inputs", 0, "shape"), ["batch"]),
    (("graphs", 0, "inputs", 0, "shape"), ["batch", "se q"]),
    (("graphs", 0, "inputs", 0, "shape"), ["batch", 0]),
    (("graphs", 0, "inputs", 1, "shape"), ["other"]),
    (("graphs", 0, "inputs", 4, "shape"), ["batch", 3, "cap", 4]),
    (("graphs", 0, "inputs", 4, "shape"), ["batch", 2, "cap", 5]),
    (("graphs", 0, "inputs", 5, "shape"), ["batch", 2, "cap2", 4]),
    (("graphs", 0, "outputs", 0, "shape"), ["batch", "num_logits", 33]),
    (("graphs", 0, "outputs", 1, "shape"), ["batch", 2, "cap2", 4]),
    (("graphs", 0, "outputs", 1, "shape"), ["batch", 2, 2**31, 4]),
]


@pytest.mark.parametrize(("path", "value"), VALUES, ids=lambda x: str(x)[:60])
def test_impossible_values(plain_manifest: Manifest, path: Path_, value: object) -> None:
    document = document_of(plain_manifest)
    holder(document, path)[path[-1]] = value
    assert refused_field(document) == named(path)


def test_an_override_is_refused_by_its_weight(plain_manifest: Manifest) -> None:
    document = document_of(plain_manifest)
    holder(document, ("quantization", "overrides"))["overrides"] = {"a.weight": "two words"}
    assert refused_field(document) == "quantization.overrides['a.weight']"


@pytest.mark.parametrize(
    ("at", "field", "why"),
    [
        (("graphs", 1), "graphs", "0 graphs of phase decode"),
        (("graphs", 0), "graphs", "0 graphs of phase prefill"),
        (("graphs", 0, "inputs", 0), "graphs[0].inputs", "role input_ids"),
        (("graphs", 0, "inputs", 2), "graphs[0].inputs", "role query_lens"),
        (("graphs", 0, "inputs", 3), "graphs[0].inputs", "role logits_indices"),
        (("graphs", 1, "inputs", 1), "graphs[1].inputs", "role past_lens"),
        (("graphs", 1, "inputs", 5), "graphs[1].inputs", "past_value of layer 1"),
        (("graphs", 1, "outputs", 0), "graphs[1].outputs", "role logits"),
        (("graphs", 0, "outputs", 3), "graphs[0].outputs", "present_key of layer 1"),
        (("kv", "layers", 1), "graphs[0].inputs[6].role", "past_key of layer 1"),
    ],
)
def test_what_the_tables_need(plain_manifest: Manifest, at: Path_, field: str, why: str) -> None:
    document = document_of(plain_manifest)
    del holder(document, at)[at[-1]]
    with pytest.raises(BundleError) as caught:
        parse_manifest(json.dumps(document).encode())
    assert caught.value.field == field
    assert why in str(caught.value)


def test_one_cache_tensor_per_layer_and_role(plain_manifest: Manifest) -> None:
    document = document_of(plain_manifest)
    twice = dict(document["graphs"][0]["inputs"][4], name="again")
    document["graphs"][0]["inputs"].append(twice)
    assert refused_field(document) == "graphs[0].inputs[8].role"
    document["graphs"][0]["inputs"][8]["layer"] = 2
    assert refused_field(document) == "graphs[0].inputs[8].role"
    document["graphs"][0]["inputs"][8]["layer"] = None
    assert refused_field(document) == "graphs[0].inputs[8].role"


def test_the_graphs_share_their_cache(plain_manifest: Manifest) -> None:
    document = document_of(plain_manifest)
    text = json.dumps(document["graphs"][1]).replace('"cap"', '"small"')
    document["graphs"][1] = json.loads(text)
    with pytest.raises(BundleError, match=r"^graphs\[1\]\.inputs: KV shapes differ"):
        parse_manifest(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("graph", "name", "fixed"), [(0, "batch", 4), (0, "seq", 16), (1, "batch", 1)]
)
def test_dimensions_that_must_be_free(
    plain_manifest: Manifest, graph: int, name: str, fixed: int
) -> None:
    document = document_of(plain_manifest)
    text = json.dumps(document["graphs"][graph]).replace(f'"{name}"', str(fixed))
    document["graphs"][graph] = json.loads(text)
    assert refused_field(document) == f"graphs[{graph}].inputs"


@pytest.mark.parametrize(("seq", "ok"), [(1, True), ("seq", True), (2, False)])
def test_decode_takes_one_token(plain_manifest: Manifest, seq: object, ok: bool) -> None:
    document = document_of(plain_manifest)
    document["graphs"][1]["inputs"][0]["shape"] = ["batch", seq]
    if ok:
        parse_manifest(json.dumps(document).encode())
    else:
        assert refused_field(document) == "graphs[1].inputs"


def multi_token(manifest: Manifest, *left_out: str) -> Manifest:
    """With the prefill graph's table for decode, but for the roles in `left_out`."""
    prefill, decode = manifest.graphs
    inputs = tuple(t for t in prefill.inputs if t.role not in left_out)
    decode = replace(decode, inputs=inputs, outputs=prefill.outputs)
    return replace(manifest, graphs=(prefill, decode))


def test_decode_may_have_the_table_of_prefill(plain_manifest: Manifest) -> None:
    assert not plain_manifest.graph("decode").is_multi_token
    good = multi_token(plain_manifest)
    assert good.graph("decode").is_multi_token
    assert parse_manifest(render_manifest(good)) == good


def with_extend(manifest: Manifest, count: int = 1) -> Manifest:
    prefill, decode = manifest.graphs
    files = tuple(replace(manifest.files[0], path=f"extend{i}.onnx") for i in range(count))
    more = tuple(replace(prefill, phase="extend", file=f.path) for f in files)
    return replace(manifest, graphs=(prefill, decode, *more), files=(*manifest.files, *files))


def test_an_extend_graph_has_the_table_of_prefill(plain_manifest: Manifest) -> None:
    good = with_extend(plain_manifest)
    assert parse_manifest(render_manifest(good)) == good
    document = document_of(good)
    del document["graphs"][2]["inputs"][2]
    assert refused_field(document) == "graphs[2].inputs"


def test_an_extend_graph_shares_the_cache(plain_manifest: Manifest) -> None:
    document = document_of(with_extend(plain_manifest))
    text = json.dumps(document["graphs"][2]).replace('"cap"', '"small"')
    document["graphs"][2] = json.loads(text)
    with pytest.raises(BundleError, match=r"^graphs\[2\]\.inputs: KV shapes differ"):
        parse_manifest(json.dumps(document).encode())


def test_there_is_one_extend_graph_at_most(plain_manifest: Manifest) -> None:
    document = document_of(with_extend(plain_manifest, 2))
    with pytest.raises(BundleError, match=r"^graphs: has 2 graphs of phase extend; at most one"):
        parse_manifest(json.dumps(document).encode())


@pytest.mark.parametrize("role", ["query_lens", "logits_indices"])
def test_decode_has_both_inputs_of_prefill_or_none(plain_manifest: Manifest, role: str) -> None:
    document = document_of(multi_token(plain_manifest, role))
    assert refused_field(document).startswith("graphs[1]")


@pytest.mark.parametrize("name", ["batch", "seq"])
def test_a_multi_token_decode_graph_has_no_fixed_length(
    plain_manifest: Manifest, name: str
) -> None:
    document = document_of(multi_token(plain_manifest))
    text = json.dumps(document["graphs"][1]).replace(f'"{name}"', "1")
    document["graphs"][1] = json.loads(text)
    assert refused_field(document) == "graphs[1].inputs"


def as_cuda(manifest: Manifest) -> Manifest:
    """With the tensors that graphs of that target have beside those of all."""
    best = ("batch", "num_logits", 8)
    longest = TensorSpec("max_total_len", "max_total_len", "int32", (1,))
    top = (
        TensorSpec("top_logits", "top_logits", "float32", best),
        TensorSpec("top_ids", "top_ids", "int64", best),
    )
    graphs = tuple(
        replace(g, inputs=(*g.inputs, longest), outputs=(*g.outputs, *top)) for g in manifest.graphs
    )
    return replace(manifest, target="cuda", graphs=graphs)


def test_graphs_for_cuda_have_tensors_of_their_own(plain_manifest: Manifest) -> None:
    good = as_cuda(multi_token(plain_manifest))
    assert parse_manifest(render_manifest(good)) == good
    for target, at in (("cpu", "role"), ("tensorrt", "role")):
        assert refused_field(document_of(replace(good, target=target))).endswith(at)
    bare = replace(plain_manifest, target="cuda")
    assert refused_field(document_of(bare)) in ("graphs[0].inputs", "graphs[0].outputs")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("max_total_len", "shape", [2]),
        ("max_total_len", "dtype", "int64"),
        ("top_ids", "dtype", "int32"),
        ("top_ids", "shape", ["batch", "num_logits", 9]),
    ],
)
def test_what_the_tensors_for_cuda_are(
    plain_manifest: Manifest, name: str, field: str, value: object
) -> None:
    document = document_of(as_cuda(multi_token(plain_manifest)))
    graph = document["graphs"][1]
    tensors = [t for side in ("inputs", "outputs") for t in graph[side]]
    next(t for t in tensors if t["name"] == name)[field] = value
    assert refused_field(document).endswith(field)


def test_recompute_needs_context_lens_in_both_graphs(plain_manifest: Manifest) -> None:
    kv = replace(plain_manifest.kv, recompute_at=16)
    extra = TensorSpec("context_lens", "context_lens", "int32", ("batch",))
    graphs = tuple(replace(g, inputs=(*g.inputs, extra)) for g in plain_manifest.graphs)
    good = replace(plain_manifest, kv=kv, graphs=graphs)
    assert parse_manifest(render_manifest(good)) == good
    one = replace(good, graphs=(graphs[0], plain_manifest.graphs[1]))
    with pytest.raises(BundleError, match=r"^graphs\[1\]\.inputs: .*context_lens"):
        parse_manifest(render_manifest(one))


@pytest.mark.parametrize(
    ("path", "value", "count"),
    [
        (("model", "eos_token_ids"), [1] * 1025, 1025),
        (("model", "num_layers"), 1, 2),
        (("files",), [], 0),
        (("files",), [{"path": "a", "size": 0, "sha256": "0" * 64}] * 10_001, 10_001),
        (("producer",), {f"tool{i}": "1" for i in range(65)}, 65),
    ],
)
def test_lengths(plain_manifest: Manifest, path: Path_, value: object, count: int) -> None:
    document = document_of(plain_manifest)
    holder(document, path)[path[-1]] = value
    field = "kv.layers" if path[-1] == "num_layers" else named(path)
    with pytest.raises(BundleError, match=rf"^{field}: has {count} entries") as caught:
        parse_manifest(json.dumps(document).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("path", "name"),
    [(("graphs", 1, "file"), "prefill.onnx"), (("weights",), "decode.onnx")],
)
def test_graphs_and_weights_are_different_files(
    plain_manifest: Manifest, path: Path_, name: str
) -> None:
    document = document_of(plain_manifest)
    holder(document, path)[path[-1]] = name
    assert refused_field(document) == named(path)
