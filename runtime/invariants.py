"""What must hold between two steps. Pure: reads the books, changes nothing."""

from collections import Counter

from trtllm_lite.runtime.block_store import BlockStore
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.kv_cache import KVCache
from trtllm_lite.runtime.request import Sequence, Status
from trtllm_lite.runtime.scheduler import Scheduler


def violations(
    kv_cache: KVCache, scheduler: Scheduler, block_store: BlockStore, config: EngineConfig
) -> list[str]:
    """Everything wrong with the books, one line each; empty when all is well."""
    return [
        *_queues(scheduler),
        *_slots(kv_cache, scheduler),
        *_decode_region(kv_cache),
        *_lengths(scheduler, config),
        *_store(block_store),
    ]


def _queues(scheduler: Scheduler) -> list[str]:
    found = []
    listed = Counter(s.id for s in (*scheduler.waiting, *scheduler.running))
    found += [f"{name} is listed {n} times" for name, n in listed.items() if n > 1]
    for queue, status in ((scheduler.waiting, Status.WAITING), (scheduler.running, Status.RUNNING)):
        wrong = (s for s in queue if s.status is not status)
        found += [f"{s.id} is {s.status.value}, listed as {status.value}" for s in wrong]
    return found


def _slots(kv_cache: KVCache, scheduler: Scheduler) -> list[str]:
    found = []
    owners = [x for x in kv_cache.owners if x is not None]
    for sequence, count in Counter(owners).items():
        if count > 1:
            found.append(f"{sequence.id} owns {count} slots")
        if sequence not in scheduler.running:
            found.append(f"{sequence.id} owns a slot and is not running")
    for sequence in scheduler.running:
        if sequence not in owners:
            found.append(f"{sequence.id} is running without a slot")
        elif sequence.slot != kv_cache.slot_of(sequence):
            slot = kv_cache.slot_of(sequence)
            found.append(f"{sequence.id} notes slot {sequence.slot} and owns slot {slot}")
    waiting = (s for s in scheduler.waiting if s.slot is not None)
    return found + [f"{s.id} is waiting and notes slot {s.slot}" for s in waiting]


def _decode_region(kv_cache: KVCache) -> list[str]:
    found = []
    for slot, owner in enumerate(kv_cache.owners):
        inside = slot < kv_cache.num_decoding
        if inside and owner is None:
            found.append(f"slot {slot} of the decode region is free")
        elif owner is not None and owner.is_decoding != inside:
            side = "inside" if inside else "outside"
            found.append(f"slot {slot} is {side} the decode region, {owner.id} is not")
    return found


def _lengths(scheduler: Scheduler, config: EngineConfig) -> list[str]:
    found = []
    for sequence in scheduler.running:
        found += _progress(sequence)
    for sequence in scheduler.waiting:
        if sequence.num_computed_tokens:
            found.append(f"{sequence.id} is waiting with computed tokens")
    for sequence in (*scheduler.running, *scheduler.waiting):
        if not len(sequence.token_ids) < sequence.max_length <= config.max_sequence_tokens:
            length = len(sequence.token_ids)
            found.append(f"{sequence.id} has {length} tokens, at most {sequence.max_length}")
    if len(scheduler.running) > config.max_num_seqs:
        found.append(f"{len(scheduler.running)} sequences run, at most {config.max_num_seqs}")
    if scheduler.kv_tokens > config.max_kv_tokens:
        found.append(f"{scheduler.kv_tokens} KV tokens, at most {config.max_kv_tokens}")
    return found


def _progress(sequence: Sequence) -> list[str]:
    found = []
    computed, length = sequence.num_computed_tokens, len(sequence.token_ids)
    if not 0 <= computed < length:
        found.append(f"{sequence.id} has {computed} of {length} tokens computed")
    if not 0 <= sequence.num_cached_tokens <= sequence.num_prompt_tokens:
        found.append(f"{sequence.id} has {sequence.num_cached_tokens} cached prompt tokens")
    return found


def _store(store: BlockStore) -> list[str]:
    found = []
    place = {key: index for index, (key, _) in enumerate(store.items())}
    held = sum(stored.block.nbytes for _, stored in store.items())
    if held != store.nbytes:
        found.append(f"the block store holds {held} bytes and counts {store.nbytes}")
    if store.nbytes > store.limit_bytes:
        found.append(f"the block store holds {store.nbytes} bytes, at most {store.limit_bytes}")
    for key, stored in store.items():
        if stored.parent is None:
            continue
        if stored.parent not in place:
            found.append(f"block {key.hex()[:8]} has lost the block before it")
        elif place[stored.parent] < place[key]:
            found.append(f"block {key.hex()[:8]} would outlive the block before it")
    return found
