"""bundle.json read strictly: round trips, and one refusal for every rule, naming its field."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import (
    FileEntry,
    GraphSpec,
    KVLayer,
    KVSpec,
    Limits,
    Manifest,
    ModelFacts,
    Phase,
    Quantization,
    Role,
    Source,
    TensorSpec,
)
from trtllm_lite.runtime.manifest_io import (
    MAX_MANIFEST_BYTES,
    parse_manifest,
    read_manifest,
    render_manifest,
    write_manifest,
)

Edit = Callable[[Callable[[dict[str, Any]], None]], None]
Path_ = tuple[str | int, ...]
Side = Literal["in", "out"]
PHASES: list[Phase] = ["prefill", "decode"]

# Random manifests that satisfy every rule

words = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,20}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp", "Cf"]), max_size=20)
hashes = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
positive = st.integers(1, 2**24)
optional = st.none() | positive
source_ids = st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp", "Cf"], exclude_characters="/\\"),
    min_size=1,
    max_size=12,
).filter(lambda text: text != "..")
quantizations = st.builds(
    Quantization,
    *[words] * 4,
    st.dictionaries(texts, words, max_size=3),
)
float_dtypes = st.sampled_from(["float32", "float16", "bfloat16"])


@st.composite
def graph_specs(draw: st.DrawFn, phase: Phase, kv: KVSpec, vocab: int, dims: str) -> GraphSpec:
    """The table of the contract with random tensor names, in random order."""
    batch, capacity, seq, num_logits = (f"{dims}_{x}" for x in "bcsn")
    specs: list[tuple[Side, Role, str, tuple[int | str, ...], int | None]] = [
        ("in", "input_ids", "int64", (batch, seq if phase == "prefill" else 1), None),
        ("in", "past_lens", "int32", (batch,), None),
        ("out", "logits", "float32", (batch, num_logits, vocab), None),
    ]
    if phase == "prefill":
        specs.append(("in", "query_lens", "int32", (batch,), None))
        specs.append(("in", "logits_indices", "int64", (batch, num_logits), None))
    if kv.recompute_at is not None:
        specs.append(("in", "context_lens", "int32", (batch,), None))
    for i, layer in enumerate(kv.layers):
        shape = (batch, layer.num_kv_heads, capacity, layer.head_dim)
        specs.append(("in", "past_key", kv.dtype, shape, i))
        specs.append(("in", "past_value", kv.dtype, shape, i))
        specs.append(("out", "present_key", kv.dtype, shape, i))
        specs.append(("out", "present_value", kv.dtype, shape, i))
    order = draw(st.permutations(specs))
    made = [
        (side, TensorSpec(f"t{n}", role, dtype, shape, layer))
        for n, (side, role, dtype, shape, layer) in enumerate(order)
    ]
    inputs = tuple(spec for side, spec in made if side == "in")
    outputs = tuple(spec for side, spec in made if side == "out")
    return GraphSpec(phase, f"{phase}-{draw(words)}.onnx", inputs, outputs)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    layers = draw(
        st.lists(
            st.builds(KVLayer, st.integers(1, 4096), st.integers(1, 65536), optional),
            min_size=1,
            max_size=2,
        )
    )
    kv = KVSpec(draw(float_dtypes), tuple(layers), recompute_at=draw(optional))
    vocab = draw(positive)
    ids = st.integers(0, vocab - 1)
    phases = draw(st.permutations(PHASES))
    graphs = tuple(draw(graph_specs(p, kv, vocab, "d")) for p in phases)
    names = ["weights.bin", *(g.file for g in graphs), "t/tokenizer.json"]
    sizes = st.integers(0, 2**53)
    source = Source("/".join(draw(st.lists(source_ids, min_size=1, max_size=2))), "gguf")
    return Manifest(
        model=ModelFacts(
            draw(words),
            draw(words),
            draw(st.integers(1, 2**53)),
            draw(st.integers(len(layers), 4096)),
            draw(st.integers(1, 2**20)),
            vocab,
            draw(st.none() | ids),
            tuple(draw(st.lists(ids, max_size=3))),
            draw(st.none() | ids),
        ),
        source=replace(source, revision=draw(st.none() | texts), sha256=draw(st.none() | hashes)),
        target=draw(words),
        dtype=draw(float_dtypes),
        quantization=draw(quantizations),
        limits=Limits(draw(st.integers(1, 65536)), draw(positive)),
        kv=kv,
        graphs=graphs,
        weights="weights.bin",
        files=tuple(FileEntry(name, draw(sizes), draw(hashes)) for name in names),
        tokenizer=draw(st.none() | st.just("t/tokenizer.json")),
        producer=draw(st.dictionaries(texts, texts, max_size=3)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(manifests())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest) -> None:
    folder = tmp_path_factory.mktemp("bundle")
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest
    assert [path.name for path in folder.iterdir()] == ["bundle.json"]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(manifests())
def test_the_file_is_plain_ascii_json_with_every_field(manifest: Manifest) -> None:
    data = render_manifest(manifest)
    document = json.loads(data.decode("ascii"))
    assert list(document)[:2] == ["format", "format_version"]
    assert set(document) == set(Manifest.__dataclass_fields__)
    for graph in document["graphs"]:
        for tensor in (*graph["inputs"], *graph["outputs"]):
            assert list(tensor) == list(TensorSpec.__dataclass_fields__)


# Strict JSON


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("[]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ("{", "not JSON"),
        ('{"a": 1,}', "not JSON"),
        ('{"a": 1} {}', "not JSON"),
        ('{"a": NaN}', "NaN"),
        ('{"a": Infinity}', "Infinity"),
        ('{"a": [-Infinity]}', "-Infinity"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "9" * 5000 + "}", "too large"),
        ('{"a": 1, "a": 1}', "duplicate key 'a'"),
        ('{"model": {"b": {"c": 1, "c": 2}}}', "duplicate key 'c'"),
        ('{"a\\n": 1, "a\\n": 1}', "duplicate key 'a\\\\n'"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_only_strict_json(text: str, why: str) -> None:
    with pytest.raises(BundleError, match=r"^bundle\.json: ") as caught:
        parse_manifest(text.encode())
    assert why.replace("\\\\", "\\") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"\xff{}", '{"a": 1}'.encode("utf-16"), b'{"a": "\x80"}'])
def test_only_utf8(data: bytes) -> None:
    with pytest.raises(BundleError, match=r"^bundle\.json: not UTF-8"):
        parse_manifest(data)


def test_ten_megabytes_are_not_read(plain_bundle: Path) -> None:
    with (plain_bundle / "bundle.json").open("ab") as file:
        file.write(b" " * 10 * 2**20)
    with pytest.raises(BundleError, match=rf"^bundle\.json: .*at most {MAX_MANIFEST_BYTES} are"):
        read_manifest(plain_bundle)
    with pytest.raises(BundleError, match=f"at most {MAX_MANIFEST_BYTES} are"):
        parse_manifest(b" " * (MAX_MANIFEST_BYTES + 1))


# Types: every field of every object, with every wrong kind of value


def leaves(value: Any, at: Path_ = ()) -> list[Path_]:
    """The path of every value inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: list[Path_] = []
    for key, inner in items:
        found.append((*at, key))
        if isinstance(inner, dict | list):
            found += leaves(inner, (*at, key))
    return found


def named(path: Path_) -> str:
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in path).lstrip(".")


def put(document: Any, path: Path_, value: object) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def refused_field(document: object) -> str:
    with pytest.raises(BundleError) as caught:
        parse_manifest(json.dumps(document).encode())
    assert "\n" not in str(caught.value)
    return caught.value.field


@pytest.mark.parametrize("wrong", [True, 1.5, -1, 2**53 + 1, "\x1b[31m", "a\nb", [], [None], {}])
def test_wrong_values_are_refused_by_field(plain_manifest: Manifest, wrong: object) -> None:
    whole = json.loads(render_manifest(plain_manifest))
    tried = 0
    for path in leaves(whole):
        if wrong in ([], {}) and path[-1] in (
            "eos_token_ids",
            "float32_values",
            "producer",
            "quantization",
            "overrides",
        ):
            continue
        document = json.loads(render_manifest(plain_manifest))
        put(document, path, wrong)
        field = refused_field(document)
        # An empty list of tensors, files or sizes has its own field or its parent's.
        assert field.startswith(named(path)) or named(path).startswith(field)
        tried += 1
    assert tried > 150


def test_absurd_lengths(plain_manifest: Manifest) -> None:
    document = json.loads(render_manifest(plain_manifest))
    put(document, ("source", "license"), "x" * 4097)
    assert refused_field(document) == "source.license"
    document = json.loads(render_manifest(plain_manifest))
    put(document, ("graphs", 1, "outputs"), [0] * 100_001)
    with pytest.raises(BundleError, match=r"^graphs\[1\]\.outputs: has 100001 items"):
        parse_manifest(json.dumps(document).encode())


def required(kind: str) -> list[str]:
    return {
        "model": ["model_type", "vocab_size", "bos_token_id", "eos_token_ids"],
        "source": ["id", "format"],
        "limits": ["max_num_seqs", "max_model_len"],
        "kv": ["dtype", "layers"],
    }[kind]


@pytest.mark.parametrize(
    "path",
    [
        *[(k,) for k in ("format", "format_version", "model", "graphs", "files", "weights")],
        *[(k, f) for k in ("model", "source", "limits", "kv") for f in required(k)],
        ("kv", "layers", 1, "head_dim"),
        ("graphs", 1, "file"),
        ("graphs", 0, "inputs", 3, "shape"),
        ("files", 2, "sha256"),
    ],
)
def test_missing_fields(plain_manifest: Manifest, path: Path_) -> None:
    document = json.loads(render_manifest(plain_manifest))
    holder: Any = document
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    assert refused_field(document) == named(path)


@pytest.mark.parametrize(
    "path", [(), ("model",), ("kv", "layers", 0), ("graphs", 1, "outputs", 2), ("files", 0)]
)
@pytest.mark.parametrize("name", ["extra", "Extra Field\n", "x" * 1000])
def test_unknown_fields_of_our_minor_are_refused(
    plain_manifest: Manifest, path: Path_, name: str
) -> None:
    document = json.loads(render_manifest(plain_manifest))
    put(document, (*path, name), 1)
    field = refused_field(document)
    assert field.startswith(named((*path, "")).rstrip("."))
    assert len(field) < 200
    document["format_version"] = "1.0"
    assert refused_field(document) == field
    document["format_version"] = "1.2"
    assert parse_manifest(json.dumps(document).encode()).format_version == "1.2"


def test_optional_fields_may_be_left_out(plain_manifest: Manifest) -> None:
    document = json.loads(render_manifest(plain_manifest))
    for key in ("tokenizer", "chat_template", "generation_config", "producer"):
        del document[key]
    for layer in document["kv"]["layers"]:
        layer.pop("sliding_window")
    layers = tuple(KVLayer(x.num_kv_heads, x.head_dim) for x in plain_manifest.kv.layers)
    expected = replace(
        plain_manifest,
        tokenizer=None,
        chat_template=None,
        generation_config=None,
        producer={},
        kv=replace(plain_manifest.kv, layers=layers),
    )
    assert parse_manifest(json.dumps(document).encode()) == expected


# Writing


def test_what_would_be_refused_is_not_written(plain_bundle: Path, plain_manifest: Manifest) -> None:
    before = (plain_bundle / "bundle.json").read_bytes()
    bad = [
        (replace(plain_manifest, target="two words"), "target"),
        (replace(plain_manifest, format_version="1.0"), "format_version"),
        (replace(plain_manifest, producer={"x": "\ud800"}), "producer.x"),
        (replace(plain_manifest, files=()), "files"),
    ]
    for manifest, field in bad:
        with pytest.raises(BundleError) as caught:
            write_manifest(plain_bundle, manifest)
        assert caught.value.field == field
    assert (plain_bundle / "bundle.json").read_bytes() == before


def test_a_failed_write_leaves_the_old_manifest(
    plain_bundle: Path, plain_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(plain_bundle.iterdir())
    old = read_manifest(plain_bundle)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(plain_bundle, replace(plain_manifest, target="other"))
    assert sorted(plain_bundle.iterdir()) == before
    assert read_manifest(plain_bundle) == old


def test_writing_does_not_follow_a_planted_link(
    plain_bundle: Path, plain_manifest: Manifest, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    (plain_bundle / "bundle.json.tmp").symlink_to(canary)
    write_manifest(plain_bundle, plain_manifest)
    assert canary.read_text() == "untouched"
    assert read_manifest(plain_bundle) == plain_manifest
