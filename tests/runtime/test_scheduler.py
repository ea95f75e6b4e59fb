"""The scheduler's rules one by one, on books without memory."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from trtllm_lite.runtime.backends.base import KVBlock
from trtllm_lite.runtime.block_store import BlockStore
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.invariants import violations
from trtllm_lite.runtime.kv_cache import KVCache
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.placement import Placement
from trtllm_lite.runtime.plan import Outcome, StepPlan
from trtllm_lite.runtime.prefix_cache import PrefixCache
from trtllm_lite.runtime.request import Request, Sequence, Status
from trtllm_lite.runtime.sampler import Sampled
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.scheduler import MIN_CHUNK, Scheduler
from trtllm_lite.runtime.transfers import Load, Move, Save

EOS = 99


def config(**changes: int) -> EngineConfig:
    base = EngineConfig(4, 100, 32, 400, block_size=4, prefix_cache_bytes=0)
    return replace(base, **cast(Any, changes))


@dataclass
class World:
    """A scheduler, its books, and a loop without memory: saves go to the store at once."""

    config: EngineConfig
    recompute_at: int | None = None
    store: BlockStore = field(init=False)
    kv: KVCache = field(init=False)
    scheduler: Scheduler = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        size = self.config.block_size
        self.store = BlockStore(self.config.store_bytes)
        self.kv = KVCache(self.config.max_num_seqs)
        prefix = PrefixCache(
            self.store, block_size=size, block_bytes=8 * size, recompute_at=self.recompute_at
        )
        self.scheduler = Scheduler(
            self.config,
            Placement(self.kv, prefix, self.recompute_at),
            eos_token_ids=(EOS,),
            clock=lambda: self.now,
        )

    def add(self, name: str, prompt: int | list[int], **params: Any) -> Sequence:
        tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
        return self.add_choice(Request(name, tuple(tokens), SamplingParams(**params)), 0)

    def add_choice(self, request: Request, index: int) -> Sequence:
        length = len(request.prompt_token_ids) + (request.params.max_tokens or 10**6)
        length = min(length, self.config.max_sequence_tokens)
        sequence = Sequence(request, index, list(request.prompt_token_ids), length)
        self.scheduler.add(sequence)
        return sequence

    def step(self, token: int = 7) -> tuple[StepPlan, list[TokenEvent]]:
        """One step in which everything that samples gets `token`."""
        plan = self.scheduler.plan()
        outcomes = {
            row.sequence: Outcome((Sampled(token, None),) if row.samples else ())
            for row in plan.rows
        }
        applied = self.scheduler.apply(plan, outcomes)
        array = np.zeros((1, self.config.block_size, 1), np.float32)
        for save in (t for t in applied.transfers if isinstance(t, Save)):
            self.store.put(save.keys, [KVBlock((array,), (array,))] * len(save.keys))
        assert violations(self.kv, self.scheduler, self.store, self.config) == []
        return plan, list(applied.events)


def shares(plan: StepPlan) -> list[tuple[str, int]]:
    """Prefill rows as (request, tokens)."""
    return [(row.sequence.request.id, row.num_tokens) for row in plan.prefill]


def names(sequences: Iterable[Sequence]) -> list[str]:
    return [s.request.id for s in sequences]


def test_prompts_are_split_into_chunks_oldest_first() -> None:
    world = World(config(max_num_batched_tokens=10))
    for name, length in (("a", 14), ("b", 9), ("c", 3)):
        world.add(name, length)
    assert shares(world.step()[0]) == [("a", 10)]
    assert names(world.scheduler.running) == ["a"]
    assert shares(world.step()[0]) == [("a", 4), ("b", 6)]
    # a decodes and takes one token of the budget
    plan, _ = world.step()
    assert [row.sequence.request.id for row in plan.decode] == ["a"]
    assert shares(plan) == [("b", 3), ("c", 3)]


def test_every_decoding_row_runs_each_step_in_slot_order() -> None:
    world = World(config(max_num_batched_tokens=10))
    for name in "abc":
        world.add(name, 3)
    plan = [world.step()[0] for _ in range(2)][1]
    assert [(r.slot, r.start, r.num_tokens) for r in plan.decode] == [(i, 3, 1) for i in range(3)]
    assert all(r.samples for r in plan.decode)


@pytest.mark.parametrize(("budget", "chunk"), [(4, 4), (16, 16), (18, 16), (30, 27)])
def test_prefill_proceeds_when_decoding_uses_the_budget_up(budget: int, chunk: int) -> None:
    assert min(MIN_CHUNK, budget) <= chunk
    world = World(config(max_num_batched_tokens=budget, max_num_seqs=5))
    for name in "abc":
        world.add(name, [1])
    for _ in range(3):
        world.step()
    world.add("long", 60)
    plan, _ = world.step()
    assert (len(plan.decode), shares(plan)) == (3, [("long", chunk)])


@pytest.mark.parametrize(
    ("budget", "prompts", "steps"),
    [
        # 23 tokens of the second prompt fit, and a sixteenth of 64 are past the budget.
        (64, (41, 27), ([("0", 41), ("1", 27)],)),
        (64, (41, 28), ([("0", 41), ("1", 23)], [("1", 5)])),
        (960, (900, 60 + 17), ([("0", 900), ("1", 60)], [("1", 17)])),  # at most MIN_CHUNK
        (64, (66,), ([("0", 64)], [("0", 2)])),  # a chunk is at most the budget
    ],
)
def test_last_tokens_of_a_prompt_go_with_the_rest(
    budget: int, prompts: tuple[int, ...], steps: tuple[list[tuple[str, int]], ...]
) -> None:
    world = World(config(max_num_batched_tokens=budget, max_model_len=2000, max_kv_tokens=4000))
    for i, length in enumerate(prompts):
        world.add(str(i), length)
    assert [shares(world.step()[0]) for _ in steps] == list(steps)


def test_chunks_know_where_they_start_and_how_long_the_row_is() -> None:
    world = World(config(max_num_batched_tokens=5))
    world.add("a", 12)
    rows = [world.step()[0].prefill[0] for _ in range(3)]
    assert [(r.start, r.num_tokens, r.context_len, r.samples) for r in rows] == [
        (0, 5, 12, False),
        (5, 5, 12, False),
        (10, 2, 12, True),
    ]


def test_a_last_single_token_belongs_to_its_prompt() -> None:
    world = World(config(max_num_batched_tokens=5))
    a = world.add("a", 6)
    plan, events = world.step()
    assert (shares(plan), events) == ([("a", 5)], [])
    assert not a.is_decoding
    plan, events = world.step()
    assert [(r.start, r.context_len) for r in plan.prefill] == [(5, 6)]
    assert events[0].token_id == 7


def test_a_prompt_of_one_token_is_prefilled() -> None:
    world = World(config())
    world.add("a", [5])
    plan, events = world.step()
    assert (shares(plan), plan.decode) == ([("a", 1)], ())
    assert events[0].token_id == 7


def test_admission_is_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    world = World(config(max_kv_tokens=60))
    a = world.add("a", 20, max_tokens=30)
    big, small = world.add("big", 40), world.add("small", 2)
    world.step()
    assert names(world.scheduler.running) == ["a"]
    assert names(world.scheduler.waiting) == ["big", "small"]
    world.scheduler.finish([a], "abort")
    world.step()
    world.step()
    assert (big.status, small.status) == (Status.RUNNING, Status.RUNNING)


def test_slots_limit_admission_and_a_left_slot_is_taken_in_the_next_step() -> None:
    world = World(config(max_num_seqs=2))
    a = world.add("a", 3)
    world.add("b", 3)
    world.add("c", 3)
    world.step()
    assert names(world.scheduler.running) == ["a", "b"]
    world.scheduler.finish([a], "abort")
    world.step()
    assert names(world.scheduler.running) == ["b", "c"]


def test_admission_leaves_every_running_sequence_room_for_one_more_token() -> None:
    # a and b hold 10 tokens and need 2 more when both run: 12.
    for limit, running in ((11, ["a"]), (12, ["a", "b"])):
        world = World(config(max_kv_tokens=limit))
        world.add("a", 5, max_tokens=2)
        world.add("b", 5, max_tokens=2)
        world.step()
        assert names(world.scheduler.running) == running
        assert world.scheduler.num_preemptions == 0


def test_one_that_fills_the_pool_alone_is_admitted_alone() -> None:
    world = World(config(max_kv_tokens=20))
    world.add("a", 19, max_tokens=1)
    _, events = world.step()
    assert events[0].finish_reason == "length"


def test_the_first_admission_is_timed_once() -> None:
    world = World(config(max_kv_tokens=12, max_num_seqs=2))
    a, b = world.add("a", 4, max_tokens=6), world.add("b", 4, max_tokens=6)
    world.now = 3.0
    world.step()
    assert (a.first_scheduled_time, b.first_scheduled_time) == (3.0, 3.0)
    world.now = 4.0
    events = [e for _ in range(12) for e in world.step()[1]]
    assert b.num_preemptions > 0
    assert {e.first_scheduled_time for e in events} == {3.0}


def test_other_choices_wait_for_the_blocks_of_the_first() -> None:
    world = World(config(prefix_cache_bytes=10**6, max_num_batched_tokens=8))
    request = Request("a", tuple(range(12)), SamplingParams(n=3))
    first, second, third = (world.add_choice(request, i) for i in range(3))
    world.add("z", [50, 51])
    world.step()
    world.step()
    assert (first.num_generated_tokens, second.status) == (1, Status.WAITING)
    world.step()
    # two blocks of 4 are there; the last token of the third is left to compute
    assert (second.num_cached_tokens, third.num_cached_tokens) == (8, 8)
    assert first.num_cached_tokens == 0


def test_other_choices_do_not_wait_when_nothing_is_kept() -> None:
    world = World(config(prefix_cache_bytes=0))
    request = Request("a", tuple(range(12)), SamplingParams(n=2))
    sequences = [world.add_choice(request, i) for i in range(2)]
    world.step()
    assert [s.num_generated_tokens for s in sequences] == [1, 1]


def test_other_choices_go_on_when_the_first_has_left() -> None:
    world = World(config(prefix_cache_bytes=10**6, max_num_batched_tokens=4))
    request = Request("a", tuple(range(12)), SamplingParams(n=2))
    first, second = (world.add_choice(request, i) for i in range(2))
    world.step()
    world.scheduler.finish([first], "abort")
    world.step()
    assert second.status is Status.RUNNING


def warm(world: World, prompt: int) -> None:
    """Run a request to its end, so that its blocks are kept."""
    world.add("warm", prompt, max_tokens=1)
    while world.scheduler.waiting or world.scheduler.running:
        world.step()


def test_a_kept_prefix_is_loaded_and_only_the_rest_is_run() -> None:
    world = World(config(prefix_cache_bytes=10**6))
    warm(world, 10)
    a = world.add("a", 10)
    plan, events = world.step()
    (load,) = plan.transfers
    assert isinstance(load, Load)
    assert (load.slot, len(load.blocks)) == (0, 2)
    assert [(r.start, r.num_tokens) for r in plan.prefill] == [(8, 2)]
    assert a.num_cached_tokens == events[0].cached_tokens == 8


def test_when_only_a_generated_token_is_left_the_row_decodes_at_once() -> None:
    """As of one that gave way and finds all its blocks again."""
    world = World(config(prefix_cache_bytes=10**6, max_num_batched_tokens=32))
    warm(world, 9)
    world.add("first", [60, 61, 62])
    world.add("a", 8).token_ids.append(8)
    plan, events = world.step()
    assert [(r.sequence.request.id, r.slot, r.start) for r in plan.decode] == [("a", 0, 8)]
    assert [(r.sequence.request.id, r.slot) for r in plan.prefill] == [("first", 1)]
    assert [type(t) for t in plan.transfers] == [Load]
    assert len(events) == 2


def test_prompt_logprobs_run_in_small_chunks_with_all_logits_and_no_cached_prefix() -> None:
    limits = {"max_num_batched_tokens": 200, "max_model_len": 200}
    world = World(config(prefix_cache_bytes=10**6, **limits))
    warm(world, 100)
    a = world.add("a", 100, prompt_logprobs=1)
    plan, _ = world.step()
    assert [(r.num_tokens, r.all_logits) for r in plan.prefill] == [(64, True)]
    plan, _ = world.step()
    assert [(r.num_tokens, r.all_logits) for r in plan.prefill] == [(36, True)]
    assert a.num_cached_tokens == 0
    assert not any(r.all_logits for r in world.step()[0].rows)


def test_prompt_logprobs_are_computed_by_the_first_choice_alone() -> None:
    world = World(config(prefix_cache_bytes=10**6))
    request = Request("a", tuple(range(12)), SamplingParams(n=2, prompt_logprobs=1))
    _, second = (world.add_choice(request, i) for i in range(2))
    world.step()
    plan, _ = world.step()
    assert second.num_cached_tokens == 8
    assert [r.all_logits for r in plan.prefill] == [False]


def test_rows_that_leave_together_cost_only_the_moves_of_those_that_stay() -> None:
    world = World(config())
    for name, length in (("a", 1), ("b", 5), ("c", 1), ("d", 5)):
        world.add(name, 3, max_tokens=1 + length)
    world.step()
    plan = world.scheduler.plan()
    outcomes = {r.sequence: Outcome((Sampled(7, None),)) for r in plan.rows}
    applied = world.scheduler.apply(plan, outcomes)
    # c leaves slot 2: d moves in; a leaves slot 0: d moves on.
    assert [t for t in applied.transfers if isinstance(t, Move)] == [Move(3, 2, 4), Move(2, 0, 4)]
    assert names(world.kv.decoding) == ["d", "b"]


def test_the_youngest_gives_way_and_goes_to_the_front() -> None:
    world = World(config(max_kv_tokens=20, max_num_seqs=3))
    sequences = [world.add(name, 4, max_tokens=8) for name in "abc"]
    world.add("d", 4)
    world.step()
    world.step()
    assert names(world.scheduler.running) == ["a", "b", "c"]
    world.step()
    assert names(world.scheduler.running) == ["a", "b"]
    assert names(world.scheduler.waiting) == ["c", "d"]
    c = sequences[2]
    assert (c.num_preemptions, c.num_computed_tokens, c.slot) == (1, 0, None)
    assert len(c.token_ids) == 7


def test_a_preempted_sequence_gets_its_own_blocks_back() -> None:
    world = World(config(max_kv_tokens=26, max_num_seqs=2, prefix_cache_bytes=10**6))
    a, b = world.add("a", 8, max_tokens=12), world.add("b", [9] * 8, max_tokens=12)
    while not b.num_preemptions:
        world.step()
    length = len(b.token_ids)
    while b.status is Status.WAITING:
        plan, _ = world.step()
    (load,) = (t for t in plan.transfers if isinstance(t, Load))
    assert len(load.blocks) * 4 == (length - 1) // 4 * 4 > 8
    assert b.num_cached_tokens == 8
    assert a.num_preemptions == 0


def test_a_sequence_that_outgrows_its_regime_is_computed_again_from_the_first_token() -> None:
    world = World(config(prefix_cache_bytes=10**6), recompute_at=6)
    a = world.add("a", 5)
    world.add("b", [1, 2])
    world.step()
    assert (a.slot, len(a.token_ids)) == (0, 6)
    plan, _ = world.step()
    assert [r.context_len for r in plan.decode] == [6, 3]
    # "a" has 7 tokens now: it left the decode region, and "b" moved into its place
    assert (a.num_computed_tokens, a.slot) == (0, 1)
    plan, _ = world.step()
    assert [(r.sequence, r.start, r.context_len) for r in plan.prefill] == [(a, 0, 7)]
    assert names(r.sequence for r in plan.decode) == ["b"]
    plan, _ = world.step()
    assert [r.context_len for r in plan.decode] == [4 + 1, 8]
    assert a.num_preemptions == 0


def test_a_prompt_beyond_the_regime_is_computed_once() -> None:
    world = World(config(), recompute_at=6)
    a = world.add("a", 7)
    computed = []
    for _ in range(5):
        world.step()
        computed.append(a.num_computed_tokens)
    assert computed == [7, 8, 9, 10, 11]


def test_what_has_ended_does_not_end_again() -> None:
    world = World(config())
    a, b = world.add("a", 3), world.add("b", 3)
    world.step()
    assert [e.finish_reason for e in world.scheduler.finish([a], "stop", "x").events] == ["stop"]
    assert world.scheduler.finish([a], "abort").events == ()
    failed = world.scheduler.fail([a, b], "lost")
    assert [(e.finish_reason, e.error) for e in failed.events] == [
        ("stop", None),
        ("error", "lost"),
    ]
    assert world.scheduler.finished == {"stop": 1, "error": 1}
