"""Profiles are the contract table and three limits."""

import itertools

import pytest

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.config import MAX_DRAFT_TOKENS, EngineConfig
from trtllm_lite.runtime.engines.profiles import EngineLimits, capacity_dim, engine_limits, profiles
from trtllm_lite.runtime.engines.record import shape_at
from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.manifest import Limits

LIMITS = EngineLimits(max_num_seqs=16, max_model_len=2000, max_num_batched_tokens=512)


def test_decode_takes_every_number_of_rows(engine_bundle: Bundle) -> None:
    (profile,) = profiles(engine_bundle.manifest.graph("decode"), LIMITS)
    assert [(d.name, d.min, d.opt, d.max) for d in profile.dims] == [("batch", 1, 16, 16)]


@pytest.mark.parametrize("phase", ["prefill", "extend"])
def test_chunks_have_all_that_a_step_may_ask_for(engine_bundle: Bundle, phase: str) -> None:
    graph = next(g for g in engine_bundle.manifest if g.phase == phase)
    (profile,) = profiles(graph, LIMITS)
    # The last tokens of a prompt may pass the budget by a sixteenth; a draft has its token too.
    for rows, tokens, wanted in itertools.product((1, 4), (1, 17, 544), (1, MAX_DRAFT_TOKENS + 1)):
        assert profile.holds({"batch": rows, "seq": tokens, "num_logits": wanted})
    assert not profile.holds({"batch": 1, "seq": 545, "num_logits": 1})
    assert not profile.holds({"batch": 0, "seq": 1, "num_logits": 1})


@pytest.mark.parametrize("most", [1, 2, 3])
def test_few_slots_are_few_rows(engine_bundle: Bundle, most: int) -> None:
    limits = EngineLimits(most, 64, 4)
    for graph in engine_bundle.manifest:
        (profile,) = profiles(graph, limits)
        batch = profile.range_of("batch")
        assert batch is not None
        assert batch.max == most


def test_every_input_has_a_shape_in_the_profile(engine_bundle: Bundle) -> None:
    for graph in engine_bundle.manifest:
        (profile,) = profiles(graph, LIMITS)
        sizes = {d.name: d.max for d in profile.dims} | {"capacity": LIMITS.capacity}
        assert all(min(shape_at(t, sizes)) >= 1 for t in graph.inputs)
        assert capacity_dim(graph) == "capacity"


def test_the_capacity_is_enough_for_the_engine() -> None:
    for length, chunk in ((1, 1), (64, 64), (2000, 512), (4096, 1)):
        config = EngineConfig(2, max(length, 2), chunk, 2 * max(length, 2))
        limits = EngineLimits(2, config.max_model_len, chunk)
        assert config.capacity <= limits.capacity < config.capacity + 64
        assert limits.capacity % 64 == 0


def test_limits_are_those_of_the_bundle_where_nobody_says() -> None:
    bundle = Limits(max_num_seqs=8, max_model_len=4096)
    assert engine_limits(bundle, None, None, None) == EngineLimits(8, 4096, 512)
    assert engine_limits(bundle, 2, 100, None) == EngineLimits(2, 100, 100)
    assert engine_limits(bundle, 2, 100, 64) == EngineLimits(2, 100, 64)


@pytest.mark.parametrize(("seqs", "length"), [(9, None), (None, 4097)])
def test_no_more_than_the_bundle_was_made_for(seqs: int | None, length: int | None) -> None:
    with pytest.raises(UsageError, match="the bundle was made for at most"):
        engine_limits(Limits(8, 4096), seqs, length, None)
