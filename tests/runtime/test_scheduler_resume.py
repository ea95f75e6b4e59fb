"""What is planned for sequences that lost their slot: prompts again, then what was decoded."""

from trtllm_lite.runtime.block_store import BlockStore
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.kv_cache import KVCache
from trtllm_lite.runtime.placement import Placement
from trtllm_lite.runtime.plan import Outcome, PlanRow
from trtllm_lite.runtime.prefix_cache import PrefixCache
from trtllm_lite.runtime.request import Request, Sequence, Status
from trtllm_lite.runtime.sampler import Sampled
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.scheduler import Scheduler


def make_scheduler(decoded_chunk: int | None) -> Scheduler:
    config = EngineConfig(2, 100, 32, 34, block_size=4, prefix_cache_bytes=0)
    prefix = PrefixCache(BlockStore(0), block_size=4, block_bytes=32, recompute_at=None)
    placement = Placement(KVCache(2), prefix, None)
    return Scheduler(config, placement, eos_token_ids=(), decoded_chunk=decoded_chunk)


def step(scheduler: Scheduler) -> list[PlanRow]:
    """The rows of prefill of a step in which everything that samples gets a token."""
    plan = scheduler.plan()
    outcomes = {
        row.sequence: Outcome((Sampled(7, None),) if row.samples else ()) for row in plan.rows
    }
    scheduler.apply(plan, outcomes)
    return list(plan.prefill)


def resumed(decoded_chunk: int | None) -> list[tuple[int, int, bool]]:
    """Start, count and kind of the chunks of a prompt of 8 that gave way after 9 more tokens."""
    scheduler = make_scheduler(decoded_chunk)
    requests = [Request(n, (9,) * 8, SamplingParams(max_tokens=12)) for n in "ab"]
    first, second = (Sequence(r, 0, list(r.prompt_token_ids), 20) for r in requests)
    for sequence in (first, second):
        scheduler.add(sequence)
    while not second.num_preemptions:
        step(scheduler)
    chunks = []
    while second.status is not Status.FINISHED:
        chunks += [(r.start, r.num_tokens, r.decoded) for r in step(scheduler)]
    assert first.num_preemptions == 0
    return chunks


def test_what_was_decoded_is_computed_again_in_chunks_of_its_own() -> None:
    chunks = resumed(3)
    assert chunks[0] == (0, 8, False)
    assert all(start >= 8 and 0 < count <= 3 and again for start, count, again in chunks[1:])
    ends = [start + count for start, count, _ in chunks]
    assert [start for start, _, _ in chunks[1:]] == ends[:-1]
    assert ends[-1] > 8 + 3


def test_without_such_a_graph_it_is_computed_like_a_prompt() -> None:
    ((start, count, again),) = resumed(None)
    assert (start, again) == (0, False)
    assert count > 8 + 3
