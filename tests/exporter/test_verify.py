"""The certificate fails when it should, says where, and says what it did not look at."""

import dataclasses
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.torch import load_file

from trtllm_lite.exporter import prompts, verify
from trtllm_lite.exporter.certificate import (
    UNBOUNDED,
    Certificate,
    Gate,
    PromptParity,
    QualityRecord,
)
from trtllm_lite.exporter.checkpoint import open_checkpoint
from trtllm_lite.exporter.checks import Findings
from trtllm_lite.exporter.gates import exact_gates
from trtllm_lite.exporter.reference import needed_bytes
from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.runtime.manifest import Manifest
from trtllm_lite.runtime.manifest_io import read_manifest, write_manifest
from trtllm_lite.runtime.progress import NoProgress

Copied = Callable[[Path], Path]


@pytest.fixture(autouse=True)
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "NEW_TOKENS", 4)
    monkeypatch.setattr(prompts, "TEXTS", prompts.TEXTS[:6])


def check(bundle: Path, checkpoint: Path | None) -> Certificate:
    return verify.verify_bundle(
        bundle, None if checkpoint is None else str(checkpoint), NoProgress()
    )


def place(bundle: Path, checkpoint: Path, name: str) -> tuple[int, int]:
    """Offset and length of a parameter in the weights file, read with the onnx package."""
    model = onnx.load(bundle / "prefill.onnx", load_external_data=False)
    (tensor,) = (t for t in model.graph.initializer if name in t.name.split("+"))
    entries = {e.key: e.value for e in tensor.external_data}
    parameters = load_file(checkpoint / "model.safetensors")
    sizes = {key: 4 * value.numel() for key, value in parameters.items()}
    parts = tensor.name.split("+")
    before = sum(sizes[part] for part in parts[: parts.index(name)])
    assert sum(sizes[part] for part in parts) == int(entries["length"])
    return int(entries["offset"]) + before, sizes[name]


def change(bundle: Path, checkpoint: Path, name: str, to: Callable[[Any], Any]) -> None:
    """Rewrite one weight, and its file's hash in the manifest, as a wrong exporter would."""
    offset, length = place(bundle, checkpoint, name)
    path = bundle / "weights.bin"
    data = bytearray(path.read_bytes())
    values = np.frombuffer(bytes(data[offset : offset + length]), np.float32)
    data[offset : offset + length] = to(values).astype(np.float32).tobytes()
    path.write_bytes(data)
    manifest = read_manifest(bundle)
    digest = sha256(data).hexdigest()
    files = tuple(
        dataclasses.replace(f, sha256=digest) if f.path == "weights.bin" else f
        for f in manifest.files
    )
    write_manifest(bundle, dataclasses.replace(manifest, files=files))


def failure_of(bundle: Path, checkpoint: Path) -> str:
    certificate = check(bundle, checkpoint)
    assert not certificate.passed
    assert certificate.failure is not None
    assert "\n" not in certificate.failure
    return certificate.failure


def test_the_bundle_as_exported_passes(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    certificate = check(tiny_bundle, tiny_checkpoint)
    assert certificate.passed
    assert certificate.failure is None
    assert (certificate.layers_verified, certificate.num_layers) == (2, 2)
    assert len(certificate.prompts) == 7
    assert {p.new_tokens for p in certificate.prompts} == {4}
    assert certificate.reference == "transformers eager, float32, tiny-llama"
    assert certificate.logit_scale > 0


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp.down_proj"])
def test_a_wrong_layer_is_named(
    tiny_bundle: Path, tiny_checkpoint: Path, copied: Copied, layer: int, part: str
) -> None:
    bundle = copied(tiny_bundle)
    change(bundle, tiny_checkpoint, f"model.layers.{layer}.{part}.weight", lambda w: w * 1.5)
    failure = failure_of(bundle, tiny_checkpoint)
    assert f"the first layer to depart is {layer}, by " in failure
    assert "logits_max_abs is " in failure


def test_a_wrong_final_norm_is_in_no_layer(
    tiny_bundle: Path, tiny_checkpoint: Path, copied: Copied
) -> None:
    bundle = copied(tiny_bundle)
    change(bundle, tiny_checkpoint, "model.norm.weight", lambda w: w + np.arange(len(w)) / 64)
    failure = failure_of(bundle, tiny_checkpoint)
    assert "no layer departs: look at the final norm and the output layer" in failure


def test_a_wrong_embedding_shows_in_the_first_layer(
    tiny_bundle: Path, tiny_checkpoint: Path, copied: Copied
) -> None:
    bundle = copied(tiny_bundle)
    change(bundle, tiny_checkpoint, "model.embed_tokens.weight", lambda w: np.roll(w, 64))
    assert "the first layer to depart is 0" in failure_of(bundle, tiny_checkpoint)


def test_a_slightly_wrong_weight_is_seen(
    tiny_bundle: Path, tiny_checkpoint: Path, copied: Copied
) -> None:
    """Too small to change a greedy token; the logits still tell."""
    bundle = copied(tiny_bundle)
    change(bundle, tiny_checkpoint, "model.layers.1.mlp.up_proj.weight", lambda w: w * 1.01)
    failure = failure_of(bundle, tiny_checkpoint)
    assert "logits_max_abs" in failure


def test_nan_fails_and_stays_json(tiny_bundle: Path, tiny_checkpoint: Path, copied: Copied) -> None:
    bundle = copied(tiny_bundle)
    change(bundle, tiny_checkpoint, "model.layers.1.mlp.up_proj.weight", lambda w: w * np.nan)
    certificate = check(bundle, tiny_checkpoint)
    failed = {g.name for g in certificate.gates if not g.passed}
    assert {"logits_max_abs", "logits_max_kl", "chunked_equals_whole"} <= failed
    assert certificate.failure is not None
    assert "the first layer to depart is 1" in certificate.failure
    json.dumps(certificate.to_json(), allow_nan=False)


def test_verifying_writes_nothing(tiny_bundle: Path, tiny_checkpoint: Path, copied: Copied) -> None:
    """A failing verify looks into the graphs, of a bundle that may be read-only."""
    bundle = copied(tiny_bundle)
    change(bundle, tiny_checkpoint, "model.norm.weight", lambda w: w * 2)
    before = {p: p.stat().st_mtime_ns for p in (bundle, *bundle.iterdir())}
    failure_of(bundle, tiny_checkpoint)
    assert {p: p.stat().st_mtime_ns for p in (bundle, *bundle.iterdir())} == before


# What it is compared with


def test_a_bundle_of_a_local_checkpoint_needs_a_reference(tiny_bundle: Path) -> None:
    with pytest.raises(UsageError, match="--reference: the bundle was made from 'tiny-llama'"):
        check(tiny_bundle, None)


def test_a_hub_id_in_the_bundle_is_the_reference(
    tiny_bundle: Path, tiny_checkpoint: Path, copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(tiny_bundle)
    manifest = read_manifest(bundle)
    source = dataclasses.replace(manifest.source, id="owner/name", revision="abc123")
    write_manifest(bundle, dataclasses.replace(manifest, source=source))
    asked: list[tuple[str, str | None]] = []

    def opened(model: str, revision: str | None, progress: Any) -> Any:
        asked.append((model, revision))
        return open_checkpoint(str(tiny_checkpoint), None, progress)

    monkeypatch.setattr(verify, "open_checkpoint", opened)
    monkeypatch.setattr(verify, "certify", lambda *_args: "made")
    for reference in (None, "owner/name", "other/name"):
        verify.verify_bundle(bundle, reference, NoProgress())
    assert asked == [("owner/name", "abc123"), ("owner/name", "abc123"), ("other/name", None)]


def test_another_model_type_is_refused(
    tiny_bundle: Path, tiny_checkpoint: Path, copied: Copied
) -> None:
    other = copied(tiny_checkpoint)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    with pytest.raises(UsageError, match="its model type is 'mistral', the bundle's 'llama'"):
        check(tiny_bundle, other)


# Fewer layers than the model has


def free_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    memory = SimpleNamespace(available=num_bytes)
    monkeypatch.setattr("trtllm_lite.exporter.verify.psutil.virtual_memory", lambda: memory)


def manifest_of(tiny_bundle: Path, **facts: Any) -> Manifest:
    manifest = read_manifest(tiny_bundle)
    return dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, **facts))


def test_layers_that_fit(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, embedding = 10**8, 2 * 320 * 64
    manifest = manifest_of(tiny_bundle, num_layers=10, num_parameters=embedding + 10 * layer)
    for layers in range(1, 11):
        free_memory(monkeypatch, needed_bytes(embedding + layers * layer))
        assert verify._layers_that_fit(manifest) == layers
        free_memory(monkeypatch, needed_bytes(embedding + layers * layer) - 1)
        if layers > 1:
            assert verify._layers_that_fit(manifest) == layers - 1
    free_memory(monkeypatch, needed_bytes(embedding + layer) - 1)
    with pytest.raises(TrtllmLiteError, match="not even one layer of the reference fits"):
        verify._layers_that_fit(manifest)


def test_fewer_layers_are_verified_and_said(
    tiny_bundle: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []

    class Notes(NoProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    model = read_manifest(tiny_bundle).model
    free_memory(monkeypatch, needed_bytes(model.num_parameters) - 1)
    certificate = verify.verify_bundle(tiny_bundle, str(tiny_checkpoint), Notes())
    assert certificate.passed
    assert (certificate.layers_verified, certificate.num_layers) == (1, 2)
    assert any("verifying the first 1 layers" in note for note in notes)
    assert [p.name for p in tiny_bundle.parent.iterdir()] == [tiny_bundle.name]


# The certificate alone


@pytest.fixture
def certificate() -> Certificate:
    return Certificate(
        gates=(Gate("a", True, 1.0, 1.0, "meaning"), Gate("b", False, UNBOUNDED, 0.5)),
        prompts=(PromptParity("水", 3, 4, None, 1e-7, 0.0), PromptParity("b", 1, 4, 2, 0.5, 0.1)),
        logit_scale=2.0,
        reference="transformers",
        num_layers=4,
        layers_verified=2,
        failure="b is large",
        skipped=("past 8197",),
        quality=(QualityRecord("decode", "int8_block32", "a.txt", 9.1, 9.0, 0.01, 0.97, 80),),
        tools={"torch": "2"},
        seconds=1.5,
        peak_rss_bytes=7,
    )


def test_round_trip(certificate: Certificate, tmp_path: Path) -> None:
    certificate.write(tmp_path / "parity.json")
    read = json.loads((tmp_path / "parity.json").read_text(encoding="utf-8"))
    assert read == json.loads(json.dumps(certificate.to_json()))
    assert read.pop("passed") is False
    gates = tuple(Gate(**g) for g in read.pop("gates"))
    prompts = tuple(PromptParity(**p) for p in read.pop("prompts"))
    skipped = tuple(read.pop("skipped"))
    quality = tuple(QualityRecord(**q) for q in read.pop("quality"))
    made = Certificate(gates=gates, prompts=prompts, skipped=skipped, quality=quality, **read)
    assert made == certificate


def measured(**changes: Any) -> Findings:
    """Findings that pass every gate, unless changed."""
    names = ("logits", "chunked_equals_whole", "decode_equals_prefill", "batched_equals_alone")
    distances = dict.fromkeys(names, 1e-6) | changes.pop("distances", {})
    prompts = [PromptParity("a", 1, 1, None, 1e-6, changes.pop("kl", 1e-9))]
    values: dict[str, Any] = {"logit_scale": 1.0, "agreed": 5, "compared": 5, **changes}
    return Findings(prompts=prompts, distances=distances, **values)


def failed_gates(findings: Findings) -> set[str]:
    return {gate.name for gate in exact_gates(findings) if not gate.passed}


def test_each_gate_can_fail() -> None:
    assert failed_gates(measured()) == set()
    assert failed_gates(measured(agreed=4)) == {"greedy_tokens"}
    for bad in (1e-3, float("inf"), float("nan"), UNBOUNDED):
        assert failed_gates(measured(kl=bad)) == {"logits_max_kl"}
        assert failed_gates(measured(distances={"logits": bad})) == {"logits_max_abs"}
        for name in ("chunked_equals_whole", "decode_equals_prefill", "batched_equals_alone"):
            assert failed_gates(measured(distances={name: bad})) == {name}


def test_limits_follow_the_logit_scale() -> None:
    distances = {"logits": 4e-3}
    assert failed_gates(measured(logit_scale=100.0, distances=distances)) == set()
    assert failed_gates(measured(logit_scale=10.0, distances=distances)) == {"logits_max_abs"}


def test_what_was_not_measured_has_not_passed() -> None:
    findings = measured()
    del findings.distances["decode_equals_prefill"]
    assert failed_gates(findings) == {"decode_equals_prefill"}
