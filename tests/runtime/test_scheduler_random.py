"""The scheduler under random traffic: its rules hold in every step, and everything ends."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import KVBlock
from trtllm_lite.runtime.block_store import BlockStore
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.invariants import violations
from trtllm_lite.runtime.kv_cache import KVCache
from trtllm_lite.runtime.placement import Placement
from trtllm_lite.runtime.plan import Outcome, StepPlan
from trtllm_lite.runtime.prefix_cache import PrefixCache
from trtllm_lite.runtime.request import Request, Sequence, Status
from trtllm_lite.runtime.sampler import Sampled
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.scheduler import MIN_CHUNK, TAIL_SHARE, Scheduler
from trtllm_lite.runtime.transfers import Save, Transfer

EOS = 99


@dataclass(frozen=True)
class Limits:
    engine: EngineConfig
    recompute_at: int | None


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    length = draw(st.integers(6, 40))
    engine = EngineConfig(
        max_num_seqs=draw(st.integers(1, 4)),
        max_model_len=length,
        max_num_batched_tokens=draw(st.integers(1, 20) | st.integers(32, 40)),
        max_kv_tokens=draw(st.integers(length, 5 * length)),
        block_size=draw(st.integers(1, 5)),
        prefix_cache_bytes=draw(st.sampled_from([0, 100, 10**6])),
    )
    return Limits(engine, draw(st.none() | st.integers(3, 20)))


arrivals = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.integers(1, 2), min_size=1, max_size=12)),
    min_size=1,
    max_size=8,
).map(lambda found: sorted(found, key=lambda x: x[0]))


# The last tokens of a prompt of 33 would go past what is left of the budget, but not all of them
# fit into one run: then none does.
JUST_TOO_LONG = Limits(
    EngineConfig(
        max_num_seqs=2,
        max_model_len=34,
        max_num_batched_tokens=32,
        max_kv_tokens=39,
        block_size=1,
        prefix_cache_bytes=0,
    ),
    None,
)


class Driver:
    """The books, and a loop in which every row that samples gets the same token."""

    def __init__(self, limits: Limits) -> None:
        self.config, self.recompute_at = limits.engine, limits.recompute_at
        self.store = BlockStore(self.config.store_bytes)
        self.kv = KVCache(self.config.max_num_seqs)
        size = self.config.block_size
        prefix = PrefixCache(
            self.store, block_size=size, block_bytes=8 * size, recompute_at=self.recompute_at
        )
        placement = Placement(self.kv, prefix, self.recompute_at)
        self.scheduler = Scheduler(self.config, placement, eos_token_ids=(EOS,))

    def add(self, name: str, prompt: list[int]) -> Sequence:
        prompt = prompt[: self.config.max_model_len - 1]
        request = Request(name, tuple(prompt), SamplingParams())
        sequence = Sequence(request, 0, prompt, self.config.max_sequence_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self, token: int) -> StepPlan:
        plan = self.scheduler.plan()
        outcome = {True: Outcome((Sampled(token, None),)), False: Outcome()}
        outcomes = {row.sequence: outcome[row.samples] for row in plan.rows}
        self._keep(self.scheduler.apply(plan, outcomes).transfers)
        assert violations(self.kv, self.scheduler, self.store, self.config) == []
        return plan

    def _keep(self, transfers: Iterable[Transfer]) -> None:
        array = np.zeros((1, self.config.block_size, 1), np.float32)
        for save in (t for t in transfers if isinstance(t, Save)):
            self.store.put(save.keys, [KVBlock((array,), (array,))] * len(save.keys))


@settings(max_examples=150, deadline=None)
@given(limits=limits(), arrivals=arrivals, eos_every=st.integers(2, 40))
@example(limits=JUST_TOO_LONG, arrivals=[(1, [1]), (2, [1] * 11)], eos_every=2)
def test_random_traffic_obeys_the_rules(
    limits: Limits, arrivals: list[tuple[int, list[int]]], eos_every: int
) -> None:
    driver = Driver(limits)
    added: list[Sequence] = []
    admitted: list[Sequence] = []
    for turn in range(2000):
        while arrivals and arrivals[0][0] <= turn:
            added.append(driver.add(str(len(added)), arrivals.pop(0)[1] * 3))
        if not arrivals and all(s.status is Status.FINISHED for s in added):
            break
        check_step(driver, EOS if turn % eos_every == 0 else 1 + turn % 2)
        started = (s for s in added if s.first_scheduled_time is not None and s not in admitted)
        admitted += started
    assert all(s.status is Status.FINISHED for s in added)
    assert admitted == added


def check_step(driver: Driver, token: int) -> None:
    """Decoding rows all run, prefill keeps to its budget, the oldest of it proceeds, and nobody
    loses computed tokens but by preemption and by a change of regime."""
    before = {s: (s.num_computed_tokens, s.num_preemptions) for s in driver.scheduler.running}
    lengths = {s: len(s.token_ids) for s in before}
    decoding = list(driver.kv.decoding)
    plan = driver.step(token)
    budget = driver.config.max_num_batched_tokens
    room = max(budget - len(decoding), min(MIN_CHUNK, budget))
    chunks = [r.num_tokens for r in plan.prefill]
    assert max(chunks, default=0) <= budget
    # Only the last of a prompt's tokens may go past the budget.
    assert sum(chunks) <= room + min(MIN_CHUNK, budget // TAIL_SHARE)
    assert sum(chunks) <= room or plan.prefill[-1].samples
    assert set(decoding) <= {r.sequence for r in plan.decode}
    prefilling = [s for s in before if s not in decoding]
    for sequence, (computed, preemptions) in before.items():
        grown = len(sequence.token_ids) > lengths[sequence]
        restarted = grown and lengths[sequence] == driver.recompute_at
        if sequence.num_preemptions == preemptions and not restarted:
            assert sequence.num_computed_tokens >= computed
            if sequence in decoding or sequence in prefilling[:1]:
                assert sequence.num_computed_tokens > computed
