"""Sound books have no violations, and each way of spoiling them is found and named."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from trtllm_lite.runtime.backends.base import KVBlock
from trtllm_lite.runtime.block_store import BlockStore
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.invariants import violations
from trtllm_lite.runtime.kv_cache import KVCache
from trtllm_lite.runtime.placement import Placement
from trtllm_lite.runtime.prefix_cache import PrefixCache
from trtllm_lite.runtime.request import Request, Sequence, Status
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.scheduler import Scheduler


class Books:
    """One decoding sequence, one in prefill, one waiting, two kept blocks of one chain."""

    def __init__(self) -> None:
        self.config = EngineConfig(3, 20, 8, 40, block_size=1)
        self.kv = KVCache(3)
        self.store = BlockStore(100)
        prefix = PrefixCache(self.store, block_size=1, block_bytes=8, recompute_at=None)
        self.scheduler = Scheduler(self.config, Placement(self.kv, prefix, None), eos_token_ids=())
        self.decoding = self.make("decoding", Status.RUNNING, 5, 4)
        self.prefilling = self.make("prefilling", Status.RUNNING, 6, 2)
        self.waiting = self.make("waiting", Status.WAITING, 3, 0)
        self.kv.promote(self.decoding)
        array = np.zeros((1, 1, 1), np.float32)
        self.store.put((b"a", b"b"), [KVBlock((array,), (array,))] * 2)

    def make(self, name: str, status: Status, length: int, computed: int) -> Sequence:
        tokens = list(range(length))
        # The newest token was generated.
        request = Request(name, tuple(tokens[:-1]), SamplingParams())
        new = Sequence(request, 0, tokens, 20, status, num_computed_tokens=computed)
        if status is Status.RUNNING:
            new.slot = self.kv.admit(new)
            self.scheduler.running.append(new)
        else:
            self.scheduler.waiting.append(new)
        return new

    def check(self) -> list[str]:
        return violations(self.kv, self.scheduler, self.store, self.config)


def test_sound_books_have_no_violations() -> None:
    assert Books().check() == []


def twice(b: Books) -> None:
    b.scheduler.running.append(b.decoding)


def finished(b: Books) -> None:
    b.decoding.status = Status.FINISHED


def orphan(b: Books) -> None:
    b.scheduler.running.remove(b.prefilling)


def slotless(b: Books) -> None:
    b.kv.free(b.prefilling)


def wrong_slot(b: Books) -> None:
    b.prefilling.slot = 2


def waiting_slot(b: Books) -> None:
    b.waiting.slot = 2


def two_slots(b: Books) -> None:
    b.kv._owners[2] = b.decoding


def hole(b: Books) -> None:
    b.kv._owners[0] = None


def not_promoted(b: Books) -> None:
    b.prefilling.num_computed_tokens = 5


def promoted_early(b: Books) -> None:
    b.kv.promote(b.prefilling)


def all_computed(b: Books) -> None:
    b.prefilling.num_computed_tokens = 6


def cached_too_much(b: Books) -> None:
    b.prefilling.num_cached_tokens = 7


def waiting_computed(b: Books) -> None:
    b.waiting.num_computed_tokens = 1


def too_long(b: Books) -> None:
    b.waiting.max_length = 3


def beyond_context(b: Books) -> None:
    b.waiting.max_length = 21


def too_many(b: Books) -> None:
    b.config = replace(b.config, max_num_seqs=1)


def over_budget(b: Books) -> None:
    b.config = replace(b.config, max_model_len=10, max_kv_tokens=10)
    for s in (b.decoding, b.prefilling, b.waiting):
        s.max_length = 10


def wrong_bytes(b: Books) -> None:
    b.store.nbytes -= 1


def over_limit(b: Books) -> None:
    b.store.limit_bytes = 15


def lost_parent(b: Books) -> None:
    stored = dict(b.store.items())[b"b"]
    object.__setattr__(stored, "parent", b"gone")


def old_parent(b: Books) -> None:
    stored = dict(b.store.items())
    object.__setattr__(stored[b"b"], "parent", None)
    object.__setattr__(stored[b"a"], "parent", b"b")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (twice, "decoding/0 is listed 2 times"),
        (finished, "decoding/0 is finished, listed as running"),
        (orphan, "prefilling/0 owns a slot and is not running"),
        (slotless, "prefilling/0 is running without a slot"),
        (wrong_slot, "prefilling/0 notes slot 2 and owns slot 1"),
        (waiting_slot, "waiting/0 is waiting and notes slot 2"),
        (two_slots, "decoding/0 owns 2 slots"),
        (hole, "slot 0 of the decode region is free"),
        (not_promoted, "slot 1 is outside the decode region, prefilling/0 is not"),
        (promoted_early, "slot 1 is inside the decode region, prefilling/0 is not"),
        (all_computed, "prefilling/0 has 6 of 6 tokens computed"),
        (cached_too_much, "prefilling/0 has 7 cached prompt tokens"),
        (waiting_computed, "waiting/0 is waiting with computed tokens"),
        (too_long, "waiting/0 has 3 tokens, at most 3"),
        (beyond_context, "waiting/0 has 3 tokens, at most 21"),
        (too_many, "2 sequences run, at most 1"),
        (over_budget, "11 KV tokens, at most 10"),
        (wrong_bytes, "the block store holds 16 bytes and counts 15"),
        (over_limit, "the block store holds 16 bytes, at most 15"),
        (lost_parent, "block 62 has lost the block before it"),
        (old_parent, "block 61 would outlive the block before it"),
    ],
)
def test_each_violation_is_found_and_named(spoil: Callable[[Books], None], message: str) -> None:
    books = Books()
    spoil(books)
    assert message in books.check()
