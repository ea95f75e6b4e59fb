"""Estimates against figures worked out by hand."""

from dataclasses import replace

import pytest

from trtllm_lite.runtime.manifest import KVLayer
from trtllm_lite.runtime.planning.memory import (
    Ledger,
    decode_scratch_bytes,
    extend_scratch_bytes,
    run_scratch_bytes,
)
from trtllm_lite.runtime.planning.roofline import Roofline
from trtllm_lite.runtime.planning.together import predict
from trtllm_lite.runtime.planning.workload import Workload

WORK = Workload(
    weight_bytes=2_000,
    step_bytes=1_500,
    body_products=600,
    head_products=100,
    vocab_size=10,
    layers=(KVLayer(2, 4), KVLayer(1, 4, sliding_window=3)),
    kv_dtype="float16",
    attention_width=16,
)


def test_the_cache_of_a_token_is_k_and_v_of_every_layer() -> None:
    assert WORK.kv_token_bytes == 2 * (2 * 4 + 1 * 4) * 2
    assert replace(WORK, kv_dtype="float32").kv_token_bytes == 2 * WORK.kv_token_bytes


def test_a_window_bounds_what_is_read_and_multiplied() -> None:
    assert WORK.kv_read_bytes(2) == 2 * WORK.kv_token_bytes
    assert WORK.kv_read_bytes(10) == 10 * 32 + 3 * 16
    # 8 of the width are each layer's: scores and values, a multiplication and an addition each.
    assert WORK.attention_flops(10) == 4 * 8 * 10 + 4 * 8 * 3


def test_a_prompt_s_tokens_see_those_up_to_them() -> None:
    assert WORK.prompt_flops(5) == 2 * (5 * 600 + 100)
    full, window = 1 + 2 + 3 + 4 + 5, 1 + 2 + 3 + 3 + 3
    assert WORK.prompt_attention_flops(5) == 4 * 8 * (full + window)


def test_a_step_takes_the_longer_of_reading_and_multiplying() -> None:
    slow_memory = Roofline(read=100.0, multiply=1e9)
    estimate = slow_memory.step(WORK, rows=3, context=2)
    assert estimate.seconds == pytest.approx((1_500 + 3 * 96) / 100)
    assert estimate.bound == "memory"
    slow_products = Roofline(read=1e9, multiply=100.0)
    estimate = slow_products.step(WORK, rows=3, context=2)
    assert estimate.seconds == pytest.approx(3 * (1_400 + 4 * 16 * 2) / 100)
    assert estimate.bound == "compute"


def test_a_prompt_reads_the_weights_once() -> None:
    assert Roofline(100.0, 1e9).prompt(WORK, 5).seconds == 15.0
    flops = WORK.prompt_flops(5) + WORK.prompt_attention_flops(5)
    assert Roofline(1e9, 100.0).prompt(WORK, 5).seconds == pytest.approx(flops / 100)


def test_requests_together_wait_for_each_other_s_prompts() -> None:
    machine = Roofline(read=100.0, multiply=1e12)
    prompt, step = 15.0, machine.step(WORK, 3, 5 + 1).seconds
    found = predict(WORK, machine, requests=3, prompt_tokens=5, new_tokens=3)
    # The prompts end at 15, 30 and 45; then two more steps of all three.
    ends = 45.0 + 2 * step
    assert found.ttft == pytest.approx(30.0)
    assert found.tpot == pytest.approx(sum((ends - first) / 2 for first in (15, 30, 45)) / 3)
    assert found.tokens_per_second == pytest.approx(9 / ends)
    alone = predict(WORK, machine, requests=1, prompt_tokens=5, new_tokens=1)
    assert alone.ttft == prompt
    assert alone.tokens_per_second == pytest.approx(1 / prompt)


def test_a_ledger_says_how_many_requests_fit() -> None:
    ledger = Ledger(
        total_bytes=100,
        reserved_bytes=10,
        weight_bytes=40,
        scratch_bytes=5,
        slot_bytes=15,
        slots=3,
    )
    assert ledger.used_bytes == 100
    assert ledger.fits
    assert ledger.most_slots == 3
    assert not replace(ledger, total_bytes=99).fits
    assert replace(ledger, total_bytes=99).most_slots == 2
    assert replace(ledger, total_bytes=20).most_slots == 0


def test_scratch_of_attention_over_the_cache_is_what_the_builder_said() -> None:
    # TensorRT-RTX 1.7.1: 67 MB for 4 rows of 8,192 tokens, 8 query heads of 64, float16.
    assert extend_scratch_bytes(4, 8_192, 8 * 64, 2) == pytest.approx(67e6, rel=0.01)


def test_scratch_of_one_token_a_row_is_flat_until_there_is_no_kernel() -> None:
    sizes = [decode_scratch_bytes(64, capacity, 128, 2) for capacity in (512, 20_480, 131_072)]
    assert sizes[0] == sizes[1] == 8 * 2**20
    # TensorRT-RTX 1.7.1: 4.38 GB of 64 rows of 131,072 tokens, 4 query heads of 32, float16.
    assert sizes[2] == pytest.approx(4.38e9, rel=0.03)


def test_scratch_of_a_run_grows_with_tokens() -> None:
    assert run_scratch_bytes(10, 7, 2) == 10 * 2 * 7 * 2
