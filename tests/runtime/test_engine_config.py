"""Limits of the engine are checked where they are made."""

from typing import Any

import pytest

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import UsageError

GOOD: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_model_len": 2,
    "max_num_batched_tokens": 1,
    "max_kv_tokens": 2,
    "prefix_cache_bytes": 0,
    "block_size": 1,
    "max_draft_tokens": 1,
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("wrong", ["below", True, "4", 4.0, None])
def test_a_limit_that_makes_no_sense_is_refused_by_name(name: str, wrong: Any) -> None:
    value = GOOD[name] - 1 if wrong == "below" else wrong
    with pytest.raises(UsageError, match=f"{name}: got .*; allowed: integers from {GOOD[name]}"):
        EngineConfig(**{**GOOD, name: value})


def test_the_lowest_limits_are_allowed() -> None:
    assert EngineConfig(**GOOD).max_model_len == 2


@pytest.mark.parametrize("wrong", ["on", "", True, None])
def test_a_kind_of_speculation_that_is_not_there_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"speculation: got .*; allowed: 'off', 'ngram'"):
        EngineConfig(**GOOD, speculation=wrong)


def test_a_draft_is_no_longer_than_kernels_round_alike_for() -> None:
    assert EngineConfig(**{**GOOD, "max_draft_tokens": 16}).max_draft_tokens == 16
    with pytest.raises(
        UsageError, match="max_draft_tokens: got 17; allowed: integers from 1 to 16"
    ):
        EngineConfig(**{**GOOD, "max_draft_tokens": 17})


def test_derived_limits() -> None:
    config = EngineConfig(2, 100, 30, 80, prefix_cache_bytes=7)
    assert config.capacity == 130
    assert config.max_sequence_tokens == 80
    assert config.store_bytes == 7
    off = EngineConfig(2, 100, 30, 800, enable_prefix_caching=False, prefix_cache_bytes=7)
    assert (off.max_sequence_tokens, off.store_bytes) == (100, 0)
