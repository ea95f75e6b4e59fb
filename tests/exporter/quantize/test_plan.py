"""Which weight gets which format, and what the choice is made from."""

import pytest

from trtllm_lite.exporter.quantize.formats import FUSED
from trtllm_lite.exporter.quantize.plan import (
    RATES,
    FormatPlan,
    Linear,
    estimated_ms,
    format_bytes_of,
    plan_formats,
)
from trtllm_lite.runtime.manifest import Quantization

TIED = Linear("embed", 1000, 64, ("embed",), is_embedding=True, is_head=True)
QKV = Linear("q+k", 96, 64, ("q", "k"))
DOWN = Linear("down", 64, 256, ("down",))
WEIGHTS = (TIED, QKV, DOWN)


def test_int8_has_a_format_for_each_phase() -> None:
    plan = plan_formats("int8", WEIGHTS)
    assert (plan.prefill, plan.decode) == ("w8a8", "int8_block32")
    assert plan.of("prefill", QKV) == "w8a8"
    assert plan.of("decode", QKV) == "int8_block32"
    # A tied pair is one tensor in both phases.
    assert plan.of("prefill", TIED) == plan.of("decode", TIED) == plan.embedding
    assert plan.embedding == "int8_block32"


@pytest.mark.parametrize(
    ("quantize", "outer"), [("int8", "int8_block32"), ("int4", "int8_block64")]
)
def test_embedding_and_head_share_a_format_of_8_bits(quantize: str, outer: str) -> None:
    plan = plan_formats(quantize, WEIGHTS)
    assert (plan.embedding, plan.lm_head) == (outer, outer)
    assert plan.of("prefill", TIED) == plan.of("decode", TIED) == outer


@pytest.mark.parametrize(
    ("quantize", "asked", "prefill"),
    [
        ("int8", None, "w8a8"),
        ("int8", "w8a8", "w8a8"),
        ("int8", "same", "int8_block32"),
        ("int4", None, "int4_block32"),
        ("int4", "same", "int4_block32"),
        ("int4", "w8a8", "w8a8"),
    ],
)
def test_prefill_formats(quantize: str, asked: str | None, prefill: str) -> None:
    assert plan_formats(quantize, WEIGHTS, asked).prefill == prefill


def test_kept_weights_have_one_format_in_both_phases() -> None:
    for quantize in ("int8", "int4"):
        plan = plan_formats(quantize, WEIGHTS, keep_int8=["down"])
        assert plan.overrides == {"down": "int8_block32"}
        assert plan.of("prefill", DOWN) == plan.of("decode", DOWN) == "int8_block32"
        assert plan.of("decode", QKV) == plan.decode
    with pytest.raises(ValueError, match="no such weights: up"):
        plan_formats("int4", WEIGHTS, keep_int8=["up"])
    same = plan_formats("int8", WEIGHTS, "same", keep_int8=["down"])
    assert same.overrides == {}, "it is in int8 blocks anyway"


def test_what_a_model_does_not_have_has_no_format() -> None:
    plan = plan_formats("int8", [QKV])
    assert (plan.embedding, plan.lm_head) == ("none", "none")
    assert plan_formats("none", WEIGHTS) == FormatPlan()


def test_the_manifest_says_the_plan() -> None:
    plan = plan_formats("int4", WEIGHTS, keep_int8=["down"])
    assert plan.to_manifest() == Quantization(
        "int4_block32", "int4_block32", "int8_block64", "int8_block64", {"down": "int8_block32"}
    )
    assert plan_formats("none", WEIGHTS).to_manifest() == Quantization()


def test_bytes_of_a_weight() -> None:
    n, k = 96, 130
    assert format_bytes_of("none", n, k) == 4 * n * k
    assert format_bytes_of("int8_block32", n, k) == n * 5 * (32 + 4)
    assert format_bytes_of("int4_block32", n, k) == n * (5 * (16 + 4) + 3)
    assert format_bytes_of("w8a8", n, k) == n * k + 4 * n


def test_the_cost_model_knows_every_format_and_grows_with_the_work() -> None:
    assert set(RATES) == {"none", *FUSED}
    for name in RATES:
        one, two = (estimated_ms(name, "decode", [DOWN] * n) for n in (1, 2))
        assert two == pytest.approx(2 * one)
        assert one > 0
    # The facts that the two phases' formats rest on.
    assert estimated_ms("int8_block32", "decode", [DOWN]) < estimated_ms("w8a8", "decode", [DOWN])
    assert estimated_ms("w8a8", "prefill", [DOWN]) < estimated_ms("int8_block32", "prefill", [DOWN])
    # A prompt's lm_head computes one token's logits.
    head = Linear("head", 64, 256, ("head",), is_head=True)
    assert estimated_ms("w8a8", "prefill", [head]) < estimated_ms("w8a8", "prefill", [DOWN]) / 100
