"""Slots, kept prefixes and regimes together: which transfers come of which change."""

from dataclasses import dataclass, field

import numpy as np

from trtllm_lite.runtime.backends.base import KVBlock
from trtllm_lite.runtime.block_store import BlockStore, chain_key
from trtllm_lite.runtime.kv_cache import KVCache
from trtllm_lite.runtime.placement import Placement
from trtllm_lite.runtime.prefix_cache import LONG_ROOT, SHORT_ROOT, PrefixCache
from trtllm_lite.runtime.request import Request, Sequence
from trtllm_lite.runtime.sampling_params import SamplingParams
from trtllm_lite.runtime.transfers import Load, Move, Release, Save, Transfer

SIZE = 4  # tokens of a block
BYTES = 8 * SIZE  # K and V of one float32 a token


def sequence(tokens: list[int], prompt: int | None = None) -> Sequence:
    """A sequence of which the first `prompt` tokens are the prompt, by default all."""
    head = tuple(tokens[: len(tokens) if prompt is None else prompt])
    return Sequence(Request("r", head, SamplingParams()), 0, list(tokens), 999)


@dataclass
class Place:
    """A placement, its books, and a store into which saves go at once."""

    slots: int = 4
    limit: int = 100 * BYTES
    recompute_at: int | None = None
    store: BlockStore = field(init=False)
    kv: KVCache = field(init=False)
    placement: Placement = field(init=False)

    def __post_init__(self) -> None:
        self.store = BlockStore(self.limit)
        self.kv = KVCache(self.slots)
        self.prefix = PrefixCache(
            self.store, block_size=SIZE, block_bytes=BYTES, recompute_at=self.recompute_at
        )
        self.placement = Placement(self.kv, self.prefix, self.recompute_at)

    def drain(self) -> tuple[Transfer, ...]:
        transfers = self.placement.drain()
        array = np.zeros((1, SIZE, 1), np.float32)
        for save in (t for t in transfers if isinstance(t, Save)):
            self.store.put(save.keys, [KVBlock((array,), (array,))] * len(save.keys))
        return transfers

    def prefilled(self, tokens: list[int]) -> Sequence:
        """A new sequence after its prefill and its first token, 7."""
        new = sequence(tokens)
        self.placement.admit(new, reuse=True)
        new.num_computed_tokens = len(tokens)
        new.token_ids.append(7)
        self.placement.settle(new, sampled=True)
        return new


def keys(root: bytes, tokens: list[int]) -> tuple[bytes, ...]:
    chain = [root]
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        chain.append(chain_key(chain[-1], tokens[start : start + SIZE]))
    return tuple(chain[1:])


def test_a_finished_prefill_keeps_its_full_blocks_and_joins_the_decode_region() -> None:
    place, tokens = Place(), list(range(10))
    place.placement.admit(sequence([50, 51]), reuse=True)
    first = place.prefilled(tokens)
    save, _ = place.drain()
    assert save == Save(1, keys(SHORT_ROOT, tokens[:8]), SIZE)
    assert (first.slot, list(place.kv.decoding)) == (0, [first])


def test_a_prefill_that_goes_on_stays_where_it_is() -> None:
    place = Place()
    new = sequence(list(range(10)))
    place.placement.admit(new, reuse=True)
    new.num_computed_tokens = 5
    place.placement.settle(new, sampled=False)
    assert place.drain() == ()
    assert (new.slot, place.kv.num_decoding) == (0, 0)


def test_only_what_the_store_lacks_is_saved() -> None:
    place = Place()
    place.prefilled(list(range(10)))
    place.drain()
    second = place.prefilled([*range(8), 90])
    assert not any(isinstance(t, Save) for t in place.drain())
    second.token_ids += [1, 2, 3]
    second.num_computed_tokens = 12
    place.placement.vacate(second, keep=True)
    assert place.drain()[0] == Save(1, keys(SHORT_ROOT, [*range(8), 90, 7, 1, 2]), SIZE)


def test_nothing_is_kept_of_what_cannot_be_trusted() -> None:
    place = Place()
    new = sequence(list(range(8)))
    place.placement.admit(new, reuse=True)
    new.num_computed_tokens = 8
    place.placement.vacate(new, keep=False)
    assert place.drain() == (Release(0),)
    assert new.slot is None


def test_a_kept_prefix_is_loaded_on_admission() -> None:
    place = Place()
    place.prefilled(list(range(10)))
    place.drain()
    new = sequence([*range(8), 90, 91])
    place.placement.admit(new, reuse=True)
    (load,) = place.drain()
    assert isinstance(load, Load)
    assert (load.slot, len(load.blocks), new.slot) == (1, 2, 1)
    assert (new.num_computed_tokens, new.num_cached_tokens) == (8, 8)
    assert place.prefix.hit_tokens == 8


def test_a_kept_prefix_is_not_loaded_without_reuse() -> None:
    place = Place()
    place.prefilled(list(range(10)))
    place.drain()
    new = sequence(list(range(10)))
    place.placement.admit(new, reuse=False)
    assert place.drain() == ()
    assert (new.num_computed_tokens, place.prefix.hit_tokens) == (0, 0)


def test_the_last_token_is_always_left_to_compute() -> None:
    place = Place()
    place.prefilled(list(range(8)))
    place.drain()
    new = sequence(list(range(8)))
    place.placement.admit(new, reuse=True)
    assert new.num_computed_tokens == 4


def test_one_with_only_its_last_token_left_is_promoted_before_it_is_loaded() -> None:
    place = Place()
    place.prefilled(list(range(8)))
    place.drain()
    other = sequence([50, 51])
    place.placement.admit(other, reuse=True)
    new = sequence([*range(8)])
    new.token_ids.append(90)
    place.placement.admit(new, reuse=True)
    (load,) = place.drain()
    assert isinstance(load, Load)
    assert (load.slot, new.slot, other.slot) == (1, 1, 2)
    assert place.kv.is_decoding(new)


def test_cached_tokens_count_the_prompt_only() -> None:
    place = Place()
    place.prefilled(list(range(12)))
    place.drain()
    again = sequence([*range(12), 7], prompt=6)
    place.placement.admit(again, reuse=True)
    assert (again.num_computed_tokens, again.num_cached_tokens) == (12, 6)


def test_a_store_that_holds_no_block_is_never_asked() -> None:
    place = Place(limit=BYTES - 1)
    assert not place.prefix.enabled
    place.prefilled(list(range(8)))
    assert place.drain() == ()


def test_a_chain_is_cut_to_what_the_store_holds() -> None:
    place, tokens = Place(limit=2 * BYTES), list(range(20))
    place.prefilled(tokens)
    assert place.drain() == (Save(0, keys(SHORT_ROOT, tokens[:8]), SIZE),)


def test_outgrowing_the_regime_starts_again_and_keeps_the_old_blocks_under_the_old_root() -> None:
    place, tokens = Place(recompute_at=9), list(range(8))
    first, second = place.prefilled(tokens), place.prefilled([50, 51])
    place.drain()
    first.num_computed_tokens = 9
    first.token_ids.append(8)
    place.placement.settle(first, sampled=True)
    assert place.drain() == (Move(1, 0, 2), Release(1))
    assert (first.num_computed_tokens, first.slot, second.slot) == (0, 1, 0)
    first.num_computed_tokens = 10
    first.token_ids.append(9)
    place.placement.settle(first, sampled=True)
    assert place.drain() == (Save(1, keys(LONG_ROOT, tokens), SIZE),)
    assert place.store.count(keys(SHORT_ROOT, tokens)) == 2
    assert first.num_computed_tokens == 10


def test_a_sequence_that_ends_as_it_outgrows_the_regime_has_blocks_of_the_old_one() -> None:
    place, tokens = Place(recompute_at=8), list(range(8))
    new = sequence(tokens)
    place.placement.admit(new, reuse=True)
    new.num_computed_tokens = 8
    new.token_ids.append(8)
    place.placement.vacate(new, keep=True)
    assert place.drain()[0] == Save(0, keys(SHORT_ROOT, tokens), SIZE)


def test_a_long_prompt_is_of_the_long_regime_from_its_first_token() -> None:
    place, tokens = Place(recompute_at=8), list(range(9))
    new = place.prefilled(tokens)
    assert place.drain() == (Save(0, keys(LONG_ROOT, tokens), SIZE),)
    assert new.num_computed_tokens == 9
    short = sequence(tokens[:8])
    place.placement.admit(short, reuse=True)
    assert short.num_computed_tokens == 0


def test_a_prompt_that_fills_the_regime_starts_again_from_its_slot_above_the_region() -> None:
    place = Place(recompute_at=8)
    new = place.prefilled(list(range(8)))
    assert place.drain() == (Save(0, keys(SHORT_ROOT, list(range(8))), SIZE), Release(0))
    assert (new.num_computed_tokens, place.kv.num_decoding) == (0, 0)


def test_starting_again_takes_kept_blocks_of_the_new_regime() -> None:
    place = Place(recompute_at=8)
    place.prefilled(list(range(9)))
    place.placement.admit(sequence([50, 51]), reuse=True)
    place.drain()
    new = place.prefilled(list(range(8)))
    save, release, load = place.drain()
    assert (type(save), release, type(load)) == (Save, Release(2), Load)
    assert new.slot == 1
    # nine tokens now, eight of them loaded: it decodes at once
    assert (new.num_computed_tokens, new.num_cached_tokens) == (8, 0)
    assert place.kv.is_decoding(new)


def test_clearing_releases_every_slot_when_nothing_else_has_changed() -> None:
    place = Place()
    place.prefilled([1, 2])
    place.drain()
    assert place.drain() == ()
    place.placement.clear()
    assert place.drain() == tuple(Release(slot) for slot in range(4))


def test_clearing_forgets_pending_transfers() -> None:
    place = Place()
    old, other = place.prefilled([1, 2]), sequence([3])
    place.drain()
    place.prefilled(list(range(8)))
    place.placement.admit(other, reuse=True)
    place.placement.clear()
    assert place.drain() == tuple(Release(slot) for slot in range(4))
    assert (old.slot, other.slot) == (None, None)
