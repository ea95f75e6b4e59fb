"""The limits of a certificate: what passes, what fails, what was never measured."""

import math
from dataclasses import replace

import pytest

from trtllm_lite.exporter.certificate import PromptParity
from trtllm_lite.exporter.checks import Findings
from trtllm_lite.exporter.gates import (
    QUALITY,
    exact_gates,
    half_gates,
    is_quantized,
    only_cache_failed,
    quality_records,
    quantized_gates,
)
from trtllm_lite.exporter.quality.measure import Quality
from trtllm_lite.exporter.quality.phases import PhaseQuality
from trtllm_lite.exporter.quantize.formats import FORMATS
from trtllm_lite.runtime.manifest import Quantization

INT8 = Quantization("w8a8", "int8_block32", "int8_block32", "int8_block32")
INT4 = Quantization("w8a8", "int4_block32", "int8_block32", "int8_block32")
NAMES = ("chunked_equals_whole", "decode_equals_prefill", "batched_equals_alone")


def findings(distance: float = 0.0, mean_kl: float = 0.0) -> Findings:
    made = Findings(logit_scale=10.0, agreed=4, compared=4)
    made.distances = dict.fromkeys((*NAMES, "logits"), distance)
    made.prompts = [PromptParity("p", 1, 1, None, 0.0, 0.0, mean_kl)]
    return made


def quality(ratio: float = 1.0, top1: float = 1.0) -> Quality:
    return Quality(ppl=10.0 * ratio, ref_ppl=10.0, kl=0.01, top1=top1, num_tokens=100)


def failed(made: Findings, prefill: Quality, decode: Quality) -> set[str]:
    gates = quantized_gates(made, PhaseQuality(prefill, decode), INT8)
    return {gate.name for gate in gates if not gate.passed}


@pytest.mark.parametrize(("dtype", "share"), [("float16", 0.01), ("bfloat16", 0.08)])
def test_half_precision_has_limits_of_its_own(dtype: str, share: float) -> None:
    """Relative to logits of 10; in another token the reference has to see a near tie."""

    def failed(made: Findings) -> set[str]:
        return {gate.name for gate in half_gates(made, dtype) if not gate.passed}

    assert failed(findings(9.99 * share)) == set()
    assert failed(findings(10.01 * share)) == {"logits_max_abs", *NAMES}
    assert failed(findings(mean_kl=0.1)) == {"prompts_mean_kl"}
    torn = findings()
    torn.agreed, torn.greedy_gap = 2, 10.01 * share
    assert failed(torn) == {"greedy_gap"}
    never = findings()
    del never.distances["decode_equals_prefill"]
    assert failed(never) == {"decode_equals_prefill"}


def test_every_format_has_a_limit() -> None:
    assert set(QUALITY) == {"none", *FORMATS}


def test_the_limits_of_int8() -> None:
    good = quality()
    assert failed(findings(), good, good) == set()
    assert failed(findings(), quality(1.0249), quality(1.0099, 0.961)) == set()
    assert failed(findings(), quality(1.0251), good) == {"prefill_perplexity"}
    assert failed(findings(), good, quality(1.0101)) == {"decode_perplexity"}
    assert failed(findings(), good, quality(1.0, 0.959)) == {"decode_top1"}
    assert failed(findings(), quality(math.nan), good) == {"prefill_perplexity"}


def in_phase(part: str, found: Quality) -> PhaseQuality:
    """`found` in prefill or in decode, and nothing lost in the other one."""
    return PhaseQuality(found, quality()) if part else PhaseQuality(quality(), found)


@pytest.mark.parametrize("part", ["", "_prefill"])
def test_the_native_kernels_have_decode_s_limits_in_both_phases(part: str) -> None:
    made = PhaseQuality(quality(), quality())
    for native, expected in (
        (quality(1.0099, 0.961), set()),
        (quality(1.0101), {f"native{part}_perplexity"}),
        (quality(1.0, 0.959), {f"native{part}_top1"}),
    ):
        gates = quantized_gates(findings(), made, INT8, {"float32": in_phase(part, native)})
        assert {gate.name for gate in gates if not gate.passed} == expected
    records = quality_records(made, INT8, "quality.txt", {"float32": in_phase(part, quality(1.1))})
    formats = {(r.phase, r.format): r.ppl for r in records[2:]}
    assert set(formats) == {("native", "int8_block32"), ("native_prefill", "int8_block32")}
    assert formats[f"native{part}", "int8_block32"] == pytest.approx(11.0)
    assert len(quality_records(made, INT8, "quality.txt")) == 2


@pytest.mark.parametrize(
    ("formats", "allowed", "too_much"), [(INT8, 1.0249, 1.0251), (INT4, 1.0519, 1.0521)]
)
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_late_in_a_long_prompt_the_native_kernels_have_prefill_s_limit(
    kind: str, formats: Quantization, allowed: float, too_much: float
) -> None:
    made = PhaseQuality(quality(), quality())
    name = "native_long" if kind == "float32" else f"native_{kind}_long"
    for ratio, expected in (
        (allowed, set()),
        (too_much, {f"{name}_perplexity"}),
        (math.nan, {f"{name}_perplexity"}),
    ):
        native = {kind: replace(made, long=quality(ratio, 0.5))}
        gates = quantized_gates(findings(), made, formats, native)
        assert {gate.name for gate in gates if not gate.passed} == expected
    records = quality_records(made, formats, "quality.txt", native)
    assert [(r.phase, r.kv_dtype) for r in records[-1:]] == [("native_long", kind)]


@pytest.mark.parametrize("part", ["", "_prefill"])
@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_each_cache_of_the_native_kernels_has_gates_of_its_own(kind: str, part: str) -> None:
    made, good, bad = PhaseQuality(quality(), quality()), quality(1.0099, 0.961), quality(1.0101)
    ours, theirs = f"native{part}_perplexity", f"native_{kind}{part}_perplexity"
    top1 = f"native_{kind}{part}_top1"
    for plain, other, expected in (
        (good, good, set()),
        (good, bad, {theirs}),
        (good, quality(math.nan, 0.959), {theirs, top1}),
        (bad, good, {ours}),
        (bad, bad, {ours, theirs}),
    ):
        native = {kind: in_phase(part, other), "float32": in_phase(part, plain)}
        gates = quantized_gates(findings(), made, INT8, native)
        names = {gate.name for gate in gates if not gate.passed}
        assert names == expected
        assert only_cache_failed(gates) is (bool(names) and ours not in names)
    both = dict.fromkeys((kind, "float32"), PhaseQuality(good, good))
    records = quality_records(made, INT8, "quality.txt", both)
    assert [(r.phase, r.kv_dtype) for r in records] == [
        ("prefill", "float32"),
        ("decode", "float32"),
        ("native", kind),
        ("native", "float32"),
        ("native_prefill", kind),
        ("native_prefill", "float32"),
    ]


def test_rows_must_not_see_each_other_in_quantized_graphs_either() -> None:
    assert failed(findings(0.4), quality(), quality()) == set()
    assert failed(findings(0.6), quality(), quality()) == {
        "chunked_equals_whole",
        "batched_equals_alone",
    }
    assert failed(findings(2.6), quality(), quality()) == set(NAMES)
    assert failed(findings(math.inf), quality(), quality()) == set(NAMES)


def test_a_prompt_that_goes_wrong_fails() -> None:
    assert failed(findings(mean_kl=0.8), quality(), quality()) == {"prompts_mean_kl"}


def test_what_was_not_measured_is_not_proved() -> None:
    empty = Findings(logit_scale=10.0)
    assert failed(empty, quality(), quality()) == {"prompts_mean_kl", *NAMES}


def test_plain_weights_must_be_equal() -> None:
    assert all(gate.passed for gate in exact_gates(findings()))
    off = findings(1e-3)
    off.agreed = 3
    assert not any(g.passed for g in exact_gates(off) if g.name != "logits_max_kl")


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        (Quantization(), False),
        (INT8, True),
        (Quantization("none", "int8_block32"), True),
        (Quantization("w8a8", "none"), True),
    ],
)
def test_is_quantized(formats: Quantization, expected: bool) -> None:
    assert is_quantized(formats) is expected


def test_the_record_holds_what_was_measured() -> None:
    made = PhaseQuality(quality(1.01, 0.97), quality(math.inf))
    prefill, decode = quality_records(made, INT8, "quality.txt")
    assert (prefill.phase, prefill.format, prefill.text) == ("prefill", "w8a8", "quality.txt")
    assert prefill.ppl == pytest.approx(10.1)
    assert prefill.ref_ppl == 10.0
    assert (prefill.kl, prefill.top1, prefill.num_tokens) == (0.01, 0.97, 100)
    assert (decode.phase, decode.format) == ("decode", "int8_block32")
    assert decode.ppl == 1e300, "JSON has no infinity"
