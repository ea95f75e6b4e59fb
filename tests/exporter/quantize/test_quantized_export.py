"""From a checkpoint to a quantized bundle, and what its certificate says."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from trtllm_lite.exporter import prompts, verify
from trtllm_lite.exporter.certificate import Certificate, Gate
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import ExportReport, export
from trtllm_lite.exporter.quantize import calibrate
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import UsageError, VerificationError
from trtllm_lite.runtime.kernels import find_kernels
from trtllm_lite.runtime.manifest import Quantization
from trtllm_lite.runtime.manifest_io import read_manifest, write_manifest
from trtllm_lite.runtime.native_weights import cache_dtypes
from trtllm_lite.runtime.progress import NoProgress

LAYERS = 2
Copied = Callable[[Path], Path]


@pytest.fixture(autouse=True)
def short_checks(monkeypatch: pytest.MonkeyPatch, traced: None) -> None:
    monkeypatch.setattr(verify, "NEW_TOKENS", 4)
    monkeypatch.setattr(verify, "TEXT_TOKENS", 512)
    monkeypatch.setattr(calibrate, "TEXT_TOKENS", 512)
    monkeypatch.setattr(prompts, "TEXTS", prompts.TEXTS[:6])


def run(checkpoint: Path, output: Path, **more: Any) -> ExportReport:
    options: dict[str, Any] = {"max_num_seqs": 4, "verify": False} | more
    return export(ExportOptions(model=str(checkpoint), output=output, **options), NoProgress())


@pytest.fixture(scope="module")
def int8_bundle(
    tiny_checkpoint: Path, fresh_graphs: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Not verified; read-only."""
    folder = tmp_path_factory.mktemp("int8") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "TEXT_TOKENS", 512)
        patch.setattr("trtllm_lite.exporter.pipeline.build_graphs", lambda *_args: fresh_graphs())
        run(tiny_checkpoint, folder, quantize="int8")
    return folder


def places(bundle: Path, phase: str) -> dict[str, tuple[int, int]]:
    """Name -> offset and length of what a graph keeps in the weights file."""
    model = onnx.load(bundle / f"{phase}.onnx", load_external_data=False)
    found = {}
    for tensor in model.graph.initializer:
        entries = {e.key: e.value for e in tensor.external_data}
        if entries:
            found[tensor.name] = int(entries["offset"]), int(entries["length"])
    return found


def suffixes(bundle: Path, phase: str) -> set[str]:
    return {n.rsplit(".", 1)[1] for n in places(bundle, phase)} - {"weight", "cos", "sin"}


# The bundle


def test_an_int8_bundle(int8_bundle: Path) -> None:
    manifest = open_bundle(int8_bundle).manifest
    assert manifest.dtype == "float32"
    assert manifest.quantization == Quantization(
        "w8a8", "int8_block32", "int8_block32", "int8_block32", {}
    )
    assert suffixes(int8_bundle, "prefill") == {"w8", "w8_scale", "q8", "q8_scale", "q8_rows"}
    assert suffixes(int8_bundle, "decode") == {"q8", "q8_scale", "q8_rows"}
    prefill, decode = (places(int8_bundle, phase) for phase in ("prefill", "decode"))
    for name in prefill.keys() & decode.keys():
        assert prefill[name] == decode[name], name
    table = "model.embed_tokens.weight"
    assert decode[f"{table}.q8"] == decode[f"{table}.q8_rows"]
    spans = sorted(set((prefill | decode).values()))
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    assert sum(spans[-1]) == (int8_bundle / "weights.bin").stat().st_size


def test_one_format_in_memory(tiny_checkpoint: Path, tmp_path: Path) -> None:
    report = run(tiny_checkpoint, tmp_path / "out", quantize="int8", prefill_format="same")
    assert places(tmp_path / "out", "prefill") == places(tmp_path / "out", "decode")
    assert suffixes(tmp_path / "out", "prefill") == {"q8", "q8_scale", "q8_rows"}
    assert report.manifest.quantization.prefill == "int8_block32"
    assert {f.format for f in report.formats} == {"int8_block32", "float32"}


def test_an_int4_bundle(tiny_checkpoint: Path, tmp_path: Path) -> None:
    report = run(tiny_checkpoint, tmp_path / "out", quantize="int4")
    formats = report.manifest.quantization
    assert (formats.prefill, formats.decode) == ("int4_block32", "int4_block32")
    assert (formats.embedding, formats.lm_head) == ("int8_block64", "int8_block64")
    assert {"q4", "q4_scale", "q4_zero"} < suffixes(tmp_path / "out", "decode")
    size = {f.format: f.bytes_per_weight for f in report.formats}
    assert size["int4_block32"] < 0.75 < size["int8_block64"]


def test_the_same_export_gives_the_same_bytes(
    tiny_checkpoint: Path, int8_bundle: Path, tmp_path: Path
) -> None:
    run(tiny_checkpoint, tmp_path / "out", quantize="int8")
    for name in ("weights.bin", "prefill.onnx", "decode.onnx", "bundle.json"):
        assert (tmp_path / "out" / name).read_bytes() == (int8_bundle / name).read_bytes(), name


def test_a_report_says_what_each_format_takes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    report = run(tiny_checkpoint, tmp_path / "out", quantize="int8", dry_run=True)
    document = json.loads(json.dumps(report.to_json()))
    assert document["quantize"] == "int8"
    assert sum(f["nbytes"] for f in document["formats"]) <= document["weight_bytes"]
    assert report.counts["prefill.w8a8"] == report.counts["decode.int8_block32"] - 1
    assert report.counts["decode.int8_block32.embedding"] == 1


# The certificate


def test_the_certificate_records_the_quality_of_both_phases(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    report = run(tiny_checkpoint, tmp_path / "out", quantize="int8", verify=True)
    assert report.parity is not None
    assert report.parity["passed"] is True
    # Whether the native kernels can run is a matter of the machine.
    names = [g["name"] for g in report.parity["gates"] if not g["name"].startswith("native")]
    assert names == [
        "prefill_perplexity",
        "decode_perplexity",
        "decode_top1",
        "prompts_mean_kl",
        "chunked_equals_whole",
        "decode_equals_prefill",
        "batched_equals_alone",
    ]
    written = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert [(q["phase"], q["format"]) for q in written["quality"]][:2] == [
        ("prefill", "w8a8"),
        ("decode", "int8_block32"),
    ]
    assert {q["phase"] for q in written["quality"]} <= {
        "prefill",
        "decode",
        "native",
        "native_prefill",
        "native_long",
    }
    for record in written["quality"]:
        assert record["text"] == "quality.txt"
        assert record["num_tokens"] > 400
        assert 0 < record["kl"] < 0.01, "quantized, so not nothing; int8, so not much"


def test_a_finished_bundle_is_verified_by_its_own_formats(
    int8_bundle: Path, tiny_checkpoint: Path
) -> None:
    certificate = verify.verify_bundle(int8_bundle, str(tiny_checkpoint), NoProgress())
    assert certificate.passed
    formats = {q.phase: q.format for q in certificate.quality}
    assert (formats["prefill"], formats["decode"]) == ("w8a8", "int8_block32")


def test_a_plain_bundle_has_no_quality(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    certificate = verify.verify_bundle(tiny_bundle, str(tiny_checkpoint), NoProgress())
    assert certificate.quality == ()
    assert "greedy_tokens" in {gate.name for gate in certificate.gates}


def scaled(bundle: Path, name: str, by: float) -> None:
    """Multiply a float32 tensor of the weights file, as a wrong exporter would."""
    offset, length = places(bundle, "decode")[name]
    data = bytearray((bundle / "weights.bin").read_bytes())
    values = np.frombuffer(bytes(data[offset : offset + length]), np.float32)
    data[offset : offset + length] = (values * np.float32(by)).tobytes()
    (bundle / "weights.bin").write_bytes(data)
    manifest = read_manifest(bundle)
    digest = sha256(data).hexdigest()
    files = tuple(
        dataclasses.replace(f, sha256=digest) if f.path == "weights.bin" else f
        for f in manifest.files
    )
    write_manifest(bundle, dataclasses.replace(manifest, files=files))


def test_wrong_scales_fail_and_say_what_to_do(
    int8_bundle: Path, tiny_checkpoint: Path, copied: Copied
) -> None:
    bundle = copied(int8_bundle)
    name = next(n for n in places(bundle, "decode") if n.endswith("down_proj.weight.q8_scale"))
    scaled(bundle, name, 2.0)
    certificate = verify.verify_bundle(bundle, str(tiny_checkpoint), NoProgress())
    failed = {gate.name for gate in certificate.gates if not gate.passed}
    assert "decode_top1" in failed
    assert "prefill_perplexity" not in failed, "prefill has weights of its own"
    assert certificate.failure is not None
    if failed <= verify.LOSSES:
        assert "prefill w8a8, decode int8_block32" in certificate.failure


# What the options leave open


def failing(gate: Gate) -> Callable[..., Certificate]:
    """`certify`, but that quantized bundles fail."""

    def certify(folder: Path, *_args: Any) -> Certificate:
        quantized = read_manifest(folder).quantization != Quantization()
        gates = (dataclasses.replace(gate, passed=not quantized),)
        failure = f"{gate.name} is too high" if quantized else None
        return Certificate(gates, (), 1.0, "transformers", LAYERS, LAYERS, failure=failure)

    return certify


def test_auto_takes_int8_when_its_certificate_passes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    report = run(tiny_checkpoint, tmp_path / "out", quantize="auto", verify=True)
    assert (report.quantize, report.why) == ("int8", "")
    assert read_manifest(tmp_path / "out").quantization.decode == "int8_block32"


def test_auto_falls_back_and_says_why(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate("decode_perplexity", False, 1.2, 1.01)
    monkeypatch.setattr("trtllm_lite.exporter.verify.certify", failing(gate))
    report = run(tiny_checkpoint, tmp_path / "out", quantize="auto", verify=True)
    assert report.quantize == "none"
    assert "int8 failed: " in report.why
    assert "decode_perplexity is too high" in report.why
    assert read_manifest(tmp_path / "out").quantization == Quantization()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_int8_that_fails_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate("decode_perplexity", False, 1.2, 1.01)
    monkeypatch.setattr("trtllm_lite.exporter.verify.certify", failing(gate))
    with pytest.raises(VerificationError, match="decode_perplexity is too high"):
        run(tiny_checkpoint, tmp_path / "out", quantize="int8", verify=True)
    assert list(tmp_path.iterdir()) == []


def losing_cache(kind: str) -> Callable[..., Certificate]:
    """`certify`, but that bundles with such a cache lose too much by it, and by nothing else."""

    def certify(folder: Path, *_args: Any) -> Certificate:
        lost = cache_dtypes(open_bundle(folder))[0] == kind
        gates = (
            Gate("native_perplexity", True, 1.0, 1.01),
            Gate(f"native_{kind}_perplexity", not lost, 1.2, 1.01),
        )
        failure = f"a {kind} cache loses" if lost else None
        return Certificate(gates, (), 1.0, "transformers", LAYERS, LAYERS, failure=failure)

    return certify


def test_auto_gives_up_a_cache_that_loses_too_much_and_nothing_else(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtllm_lite.exporter.verify.certify", losing_cache("float16"))
    options = {"quantize": "int8", "prefill_format": "same", "verify": True}
    with pytest.raises(VerificationError, match="a float16 cache loses"):
        run(tiny_checkpoint, tmp_path / "out", kv_dtype="float16", **options)
    report = run(tiny_checkpoint, tmp_path / "out", kv_dtype="auto", **options)
    assert (report.quantize, report.kv_dtypes) == ("int8", ("float32",))
    assert cache_dtypes(open_bundle(tmp_path / "out")) == ("float32",)


@pytest.mark.parametrize(("asked", "made"), [("auto", "float16"), ("int8", "int8")])
def test_the_certificate_has_gates_for_each_cache(
    tiny_checkpoint: Path, tmp_path: Path, asked: str, made: str
) -> None:
    options = {"quantize": "int8", "prefill_format": "same", "verify": True}
    report = run(tiny_checkpoint, tmp_path / "out", kv_dtype=asked, **options)
    assert report.kv_dtypes == (made, "float32")
    assert report.parity is not None
    native = {q["kv_dtype"]: q for q in report.parity["quality"] if q["phase"] == "native"}
    gates = {g["name"] for g in report.parity["gates"] if g["name"].startswith("native")}
    if find_kernels().library is not None:
        assert list(native) == [made, "float32"]
        assert native[made]["kl"] != native["float32"]["kl"]
        assert gates == {
            f"native_{part}{measure}"
            for part in ("", "prefill_", f"{made}_", f"{made}_prefill_")
            for measure in ("perplexity", "top1")
        }
    certificate = verify.verify_bundle(tmp_path / "out", str(tiny_checkpoint), NoProgress())
    assert {q.kv_dtype for q in certificate.quality if q.phase == "native"} == set(native)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"quantize": "int3"}, "--quantize: got 'int3'; allowed: none, int8, int4, fp8, auto"),
        ({"prefill_format": "w8a8"}, "--prefill-format: it needs --quantize"),
        (
            {"quantize": "int8", "prefill_format": "int4"},
            "--prefill-format: got 'int4'; allowed: w8a8, same",
        ),
        ({"quantize": "int8", "dtype": "bfloat16"}, "--dtype bfloat16: with --quantize int8"),
        ({"quantize": "auto", "verify": False}, "--quantize auto: it decides by the certificate"),
        ({"quantize": "auto", "verify": True, "dry_run": True}, "--quantize auto"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(tmp_path, tmp_path / "out", **wrong)
