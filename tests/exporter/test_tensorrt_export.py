"""`export --target tensorrt`: what is in the bundle, in each type and format; what is refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from trtllm_lite import LLM, SamplingParams
from trtllm_lite.exporter import prompts, verify
from trtllm_lite.exporter.bundle_options import options_of
from trtllm_lite.exporter.lowering import tensorrt
from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.exporter.pipeline import ExportReport, export
from trtllm_lite.exporter.reference import relative_kl
from trtllm_lite.exporter.trace import trace
from trtllm_lite.runtime.backends import open_session
from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.engines.onnx_edit import attention_nodes
from trtllm_lite.runtime.errors import UnsupportedError, UsageError
from trtllm_lite.runtime.manifest import Quantization
from trtllm_lite.runtime.manifest_io import read_manifest, write_manifest
from trtllm_lite.runtime.progress import NoProgress

Export = Callable[..., ExportReport]
PROTO = onnx.TensorProto


@pytest.fixture(scope="module")
def export_once(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Exports the tiny checkpoint for TensorRT; it is traced once."""
    folder, kept = tmp_path_factory.mktemp("tensorrt"), list[ir.Model]()

    def trace_once(*args: Any) -> ir.Model:
        if not kept:
            kept.append(trace(*args))
        return kept[0].clone()

    def run(name: str, **more: Any) -> ExportReport:
        values: dict[str, Any] = {"target": "tensorrt", "max_model_len": 64}
        values |= {"verify": False, "scout": False}
        values |= {"model": str(tiny_checkpoint), "output": folder / name}
        options = ExportOptions(**(values | more))
        return export(options, NoProgress())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtllm_lite.exporter.graphs.trace", trace_once)
        patch.setattr("trtllm_lite.exporter.verify.TEXT_TOKENS", 192)
        yield run


@pytest.fixture(scope="module")
def half(export_once: Export) -> ExportReport:
    """The default: float16, verified."""
    return export_once("half", verify=True, scout=True)


def path(report: ExportReport, phase: str) -> Path:
    assert report.output is not None
    return report.output / f"{phase}.onnx"


def graph(report: ExportReport, phase: str) -> onnx.ModelProto:
    return onnx.load(path(report, phase), load_external_data=False)


def logits(report: ExportReport) -> Any:
    """Of all positions of a prompt, by prefill: [tokens, vocab]."""
    bundle = open_bundle(report.output or Path(), check_hashes=False)
    session = open_session(bundle, SessionOptions(num_slots=1, capacity=32))
    ids, lens = np.arange(3, 27)[None], np.array([24], np.int32)
    batch = Batch("prefill", 0, ids, lens * 0, lens, lens, np.arange(24)[None])
    found = session.run(batch)[0].copy()
    session.close()
    return found


def operators(report: ExportReport, phase: str) -> set[tuple[str, str]]:
    return {(node.domain, node.op_type) for node in graph(report, phase).graph.node}


def test_three_graphs_in_half_precision(half: ExportReport) -> None:
    manifest = half.manifest
    assert (manifest.target, manifest.dtype, manifest.kv.dtype) == (
        "tensorrt",
        "float16",
        "float16",
    )
    assert [g.phase for g in manifest.graphs] == ["prefill", "decode", "extend"]
    assert [g.is_multi_token for g in manifest.graphs] == [True, False, True]
    for spec in manifest.graphs:
        model = graph(half, spec.phase)
        onnx.checker.check_model(path(half, spec.phase))
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
        assert model.ir_version == 11
        assert [v.name for v in model.graph.input] == [t.name for t in spec.inputs]
        assert [v.name for v in model.graph.output] == [t.name for t in spec.outputs]
        kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
        assert (kinds["past_key_0"], kinds["past_lens"]) == (PROTO.FLOAT16, PROTO.INT32)


def test_its_certificate_is_that_of_half_precision(half: ExportReport) -> None:
    assert half.parity is not None
    gates = {g["name"]: g["passed"] for g in half.parity["gates"]}
    assert set(gates) >= {"prompts_mean_kl", "greedy_gap", "decode_equals_prefill"}
    assert all(gates.values())


def test_graphs_share_their_weights(half: ExportReport) -> None:
    graphs_of = [graph(half, p).graph for p in ("prefill", "decode", "extend")]
    places = [
        {t.name: t.external_data[1].value for t in g.initializer if t.external_data}
        for g in graphs_of
    ]
    assert places[0] == places[1] == places[2]
    assert len(places[0]) > 10


def test_only_rows_that_are_wanted_reach_the_head(half: ExportReport) -> None:
    """The head's product is of picked rows, or of the one row that there is."""
    for phase, picked in (("prefill", True), ("decode", False), ("extend", True)):
        assert (("", "GatherND") in operators(half, phase)) == picked


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_only_tensorrt_has_a_form_of_attention(target: str) -> None:
    with pytest.raises(UsageError, match=f"--attention mask: got --target {target}"):
        ExportOptions("m", Path("out"), target=target, attention="mask")


def test_masks_in_place_of_lengths(half: ExportReport, export_once: Export) -> None:
    """Nothing is left that a parser of TensorRT drops; the graphs compute the same."""
    made = export_once("masks", attention="mask", verify=True)
    assert made.parity is not None
    assert all(gate["passed"] for gate in made.parity["gates"])
    seen = {}
    for report in (half, made):
        for phase in ("prefill", "decode", "extend"):
            nodes = attention_nodes(path(report, phase).read_bytes())
            assert len(nodes) == made.manifest.model.num_layers
            seen[report is made, phase] = {(n.lengths is not None, n.is_causal) for n in nodes}
    assert seen[False, "decode"] == {(True, False)}
    assert seen[False, "extend"] == {(True, True)}
    assert seen[True, "decode"] == seen[True, "extend"] == {(False, False)}
    assert seen[True, "prefill"] == seen[False, "prefill"] == {(False, True)}
    assert logits(made) == pytest.approx(logits(half))
    again = [options_of(open_bundle(r.output or Path()), "m", Path("o")) for r in (half, made)]
    assert [options.attention for options in again] == ["lengths", "mask"]


@pytest.mark.parametrize(
    ("quantize", "kind", "element", "nats"),
    [
        ("int8", "int8_dq32", PROTO.INT8, 1e-3),
        ("int4", "int4_dq32", PROTO.INT4, 0.1),
        ("fp8", "fp8_dq32", PROTO.FLOAT8E4M3FN, 1e-2),
    ],
)
def test_quantized_weights(
    quantize: str,
    kind: str,
    element: int,
    nats: float,
    half: ExportReport,
    export_once: Export,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No calibration text for 4 bits: nothing is to be had for the reference's memory.
    monkeypatch.setattr("trtllm_lite.exporter.quantize.calibrate._free_bytes", lambda: 0)
    made = export_once(quantize, quantize=quantize)
    formats = made.manifest.quantization
    assert (formats.prefill, formats.decode, formats.embedding) == (kind, kind, "none")
    for phase in ("prefill", "decode", "extend"):
        model = graph(made, phase)
        onnx.checker.check_model(path(made, phase))
        by_name = {t.name: t for t in model.graph.initializer}
        nodes = [n for n in model.graph.node if n.op_type == "DequantizeLinear"]
        assert len(nodes) == 4 * made.manifest.model.num_layers + 1
        assert element in {by_name[n.input[0]].data_type for n in nodes}
        assert {by_name[n.input[1]].data_type for n in nodes} == {PROTO.FLOAT16}
    plain, coded = logits(half), logits(made)
    divergence = [relative_kl(p, c) for p, c in zip(plain, coded, strict=True)]
    assert 0 < max(divergence) < nats


def test_int8_weights_are_proved(export_once: Export) -> None:
    made = export_once("proved", quantize="int8", verify=True)
    assert made.parity is not None
    gates = {g["name"]: g["passed"] for g in made.parity["gates"]}
    assert set(gates) >= {"prefill_perplexity", "decode_perplexity", "decode_top1"}
    assert all(gates.values())


def test_a_bundle_is_verified_as_it_was_exported(
    half: ExportReport, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ExportOptions] = []
    monkeypatch.setattr(verify, "certify", lambda *args: seen.append(args[2]))
    folder = half.output or Path()
    manifest = read_manifest(folder)
    for quantize, kind in (("none", "none"), ("int4", "int4_dq64"), ("fp8", "fp8_dq128")):
        formats = Quantization(prefill=kind, decode=kind)
        write_manifest(folder, dataclasses.replace(manifest, quantization=formats))
        verify.verify_bundle(folder, str(tiny_checkpoint), NoProgress(), check_hashes=False)
        assert (seen[-1].target, seen[-1].dtype, seen[-1].quantize) == (
            "tensorrt",
            "float16",
            quantize,
        )
        assert (seen[-1].attention, seen[-1].scout) == ("lengths", False)
    write_manifest(folder, manifest)


def test_the_engine_serves_it(half: ExportReport) -> None:
    """Prefix reuse and chunks by the extend graph; two requests at a time."""
    assert half.output is not None
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompt = [5, 9, 33, 7, 21, 9, 11, 40, 3] * 5
    with LLM(half.output, max_num_batched_tokens=16, host_cache=False) as llm:
        first, other = llm.generate(prompt_token_ids=[prompt, prompt[:9]], params=params)
        (again,) = llm.generate(prompt_token_ids=[prompt], params=params)
        whole = LLM(half.output, host_cache=False, enable_prefix_caching=False)
        with whole:
            (alone,) = whole.generate(prompt_token_ids=[prompt], params=params)
    tokens = [list(r.outputs[0].token_ids) for r in (first, again, alone, other)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(tokens[3]) == 6


def test_several_tokens_a_row_can_be_verified(half: ExportReport) -> None:
    assert half.output is not None
    session = open_session(open_bundle(half.output), SessionOptions(num_slots=1, capacity=32))
    assert session.info.multi_token_decode
    assert not session.info.shape_invariant
    ids, lens = np.array([[4, 9, 7, 30, 8]]), np.array([5], np.int32)
    session.run(Batch("prefill", 0, ids, lens * 0, lens, lens, np.array([[4]])))
    more, three = np.array([[11, 12, 13]]), np.array([3], np.int32)
    guessed = Batch("decode", 0, more, lens, three, lens + 3, np.arange(3)[None])
    together = session.run(guessed).copy()
    one = np.ones(1, np.int32)
    for i in range(3):
        step = Batch("decode", 0, more[:, i : i + 1], lens + i, one, lens + i + 1, np.array([[0]]))
        np.testing.assert_allclose(session.run(step)[0, 0], together[0, i], atol=5e-3)
    session.close()


@pytest.fixture(scope="module")
def brief(export_once: Export) -> ExportReport:
    """bfloat16, verified."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "NEW_TOKENS", 4)
        patch.setattr(prompts, "TEXTS", prompts.TEXTS[:4])
        return export_once("bfloat16", dtype="bfloat16", verify=True)


def test_bfloat16_is_proved_with_every_value_rounded(brief: ExportReport) -> None:
    assert (brief.manifest.dtype, brief.manifest.kv.dtype) == ("bfloat16", "bfloat16")
    assert brief.parity is not None
    assert brief.parity["passed"]
    assert brief.parity["arithmetic"] == "float32 on the CPU, each value rounded to bfloat16"
    gates = {g["name"]: g for g in brief.parity["gates"]}
    assert set(gates) >= {"prompts_mean_kl", "greedy_gap", "decode_equals_prefill"}
    # Three bits fewer than float16: far above what sums in another order make of float32.
    assert gates["logits_max_abs"]["value"] > 5e-4 * brief.parity["logit_scale"]


def test_a_wrong_weight_in_bfloat16_fails_and_is_found(
    brief: ExportReport,
    tiny_checkpoint: Path,
    copied: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(brief.output or Path())
    tensor = next(t for t in graph(brief, "decode").graph.initializer if "1.mlp.down_" in t.name)
    places = {e.key: int(e.value) for e in tensor.external_data if e.key != "location"}
    with (folder / "weights.bin").open("r+b") as file:
        file.seek(places["offset"])
        numbers = np.frombuffer(file.read(places["length"]), ml_dtypes.bfloat16)
        file.seek(places["offset"])
        file.write((numbers * ml_dtypes.bfloat16(2)).tobytes())
    monkeypatch.setattr(verify, "NEW_TOKENS", 4)
    monkeypatch.setattr(prompts, "TEXTS", prompts.TEXTS[:4])
    found = verify.verify_bundle(folder, str(tiny_checkpoint), NoProgress(), check_hashes=False)
    assert not found.passed
    assert found.failure is not None
    assert "the first layer to depart is 1, by " in found.failure


def test_bfloat16_runs_on_no_cpu(brief: ExportReport) -> None:
    assert brief.output is not None
    with pytest.raises(UsageError, match="computes in bfloat16, for which ONNX Runtime has no CPU"):
        open_session(open_bundle(brief.output), SessionOptions(num_slots=1, capacity=32))


def test_a_graph_that_tensorrt_gets_wrong_is_refused(
    export_once: Export, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path) -> None:
        raise UnsupportedError(f"a form ({path.name})", "none", "nothing")

    strict = dataclasses.replace(tensorrt.TARGET, check=refuse)
    monkeypatch.setattr(tensorrt, "TARGET", strict)
    with pytest.raises(UnsupportedError, match=r"a form \(prefill.onnx\)"):
        export_once("refused", output=tmp_path / "refused")
    assert not list(tmp_path.iterdir())


def test_it_is_refused_before_any_weight_is_written(
    export_once: Export, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(model: ir.Model) -> None:
        raise UnsupportedError(f"a form ({model.graph.name})", "none", "nothing")

    strict = dataclasses.replace(tensorrt.TARGET, refuse=refuse)
    monkeypatch.setattr(tensorrt, "TARGET", strict)
    for dry_run in (True, False):
        with pytest.raises(UnsupportedError, match=r"a form \(prefill\)"):
            export_once("early", output=tmp_path / "early", dry_run=dry_run)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_dtype": "float16"}, "--kv-dtype float16: "),
        ({"quantize": "int8", "prefill_format": "same"}, "--prefill-format same: all graphs for"),
        ({"target": "cpu", "quantize": "fp8"}, "--quantize fp8: got --target cpu; only TensorRT"),
        ({"target": "vulkan"}, "--target: got 'vulkan'; allowed: cpu, cuda, tensorrt"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"target": "tensorrt", "verify": False} | given
    with pytest.raises(UsageError, match="^" + message):
        ExportOptions("model", Path("out"), **values)
