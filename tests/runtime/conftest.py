"""A minimal bundle on disk: fake graphs that are valid protobuf, and a manifest that fits them."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
from trtllm_lite.runtime.manifest_io import write_manifest

VOCAB = 32
LAYERS = (KVLayer(2, 4), KVLayer(1, 8, sliding_window=16))


def _field(number: int, payload: bytes | int) -> bytes:
    """One protobuf field: an integer below 128, or bytes shorter than 128."""
    if isinstance(payload, int):
        return bytes([number << 3, payload])
    tag = (number << 3) | 2
    head = [tag] if tag < 128 else [tag & 0x7F | 0x80, tag >> 7]
    return bytes([*head, len(payload)]) + payload


def fake_graph(location: str = "weights.bin") -> bytes:
    """A ModelProto whose one initializer is 16 float32 at the start of `location`."""
    entry = _field(1, b"location") + _field(2, location.encode())
    tensor = _field(1, 16) + _field(2, 1) + _field(8, b"w") + _field(13, entry) + _field(14, 1)
    return _field(1, 10) + _field(7, _field(5, tensor))


def _cache(part: str) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{role}_{i}", role, "float32", ("batch", k.num_kv_heads, "cap", k.head_dim), i)
        for i, k in enumerate(LAYERS)
        for role in _cache_roles(part)
    )


def _cache_roles(part: str) -> tuple[Role, Role]:
    return ("past_key", "past_value") if part == "past" else ("present_key", "present_value")


def fake_graph_spec(phase: Phase) -> GraphSpec:
    prefill = phase == "prefill"
    inputs = [
        TensorSpec("input_ids", "input_ids", "int64", ("batch", "seq" if prefill else 1)),
        TensorSpec("past_lens", "past_lens", "int32", ("batch",)),
    ]
    if prefill:
        inputs += [
            TensorSpec("query_lens", "query_lens", "int32", ("batch",)),
            TensorSpec("logits_indices", "logits_indices", "int64", ("batch", "num_logits")),
        ]
    logits = TensorSpec(
        "logits", "logits", "float32", ("batch", "num_logits" if prefill else 1, VOCAB)
    )
    return GraphSpec(
        phase, f"{phase}.onnx", (*inputs, *_cache("past")), (logits, *_cache("present"))
    )


@pytest.fixture
def plain_manifest() -> Manifest:
    """A manifest that passes every check; its files are those of `plain_bundle`."""
    return Manifest(
        model=ModelFacts("fake", "FakeForCausalLM", 16, 2, 8, VOCAB, 1, (2, 3)),
        source=Source("org/fake", "safetensors", license="Apache-2.0"),
        target="cpu",
        dtype="float32",
        quantization=Quantization(),
        limits=Limits(max_num_seqs=4, max_model_len=64),
        kv=KVSpec("float32", LAYERS),
        graphs=(fake_graph_spec("prefill"), fake_graph_spec("decode")),
        weights="weights.bin",
        files=tuple(_entry(name, data) for name, data in _contents().items()),
        tokenizer="tokenizer.json",
        chat_template="chat_template.jinja",
        generation_config="generation_config.json",
        producer={"trtllm-lite": "0.1.0"},
    )


def _contents() -> dict[str, bytes]:
    return {
        "prefill.onnx": fake_graph(),
        "decode.onnx": fake_graph(),
        "weights.bin": bytes(range(64)),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b"{}",
        "parity.json": b'{"passed": true}',
    }


def _entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def plain_bundle(tmp_path: Path, plain_manifest: Manifest) -> Path:
    """The folder of a minimal valid bundle."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    for name, data in _contents().items():
        (folder / name).write_bytes(data)
    write_manifest(folder, plain_manifest)
    return folder


@pytest.fixture
def put_file(plain_bundle: Path, plain_manifest: Manifest) -> Callable[[str, bytes], None]:
    """Replaces a listed file of `plain_bundle` and its entry in the manifest."""

    def put(name: str, data: bytes) -> None:
        (plain_bundle / name).write_bytes(data)
        files = tuple(_entry(name, data) if f.path == name else f for f in plain_manifest.files)
        write_manifest(plain_bundle, replace(plain_manifest, files=files))

    return put


@pytest.fixture
def edit_manifest(plain_bundle: Path) -> Callable[[Callable[[dict[str, Any]], None]], None]:
    """Edits the JSON of bundle.json in `plain_bundle` without any check."""

    def edit(change: Callable[[dict[str, Any]], None]) -> None:
        path = plain_bundle / "bundle.json"
        document = json.loads(path.read_bytes())
        change(document)
        path.write_text(json.dumps(document), encoding="utf-8")

    return edit
