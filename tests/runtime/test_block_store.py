"""The block store against a slow model of it: chains as tuples of tokens, a plain list for age."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_lite.runtime.backends.base import KVBlock
from trtllm_lite.runtime.block_store import BlockStore, chain_key, root_key

BLOCK = 8  # bytes of `block(...)` with one token: K and V of one float32 each

Path = tuple[int, ...]


def block(tokens: int = 1, fill: float = 0.0) -> KVBlock:
    array = np.full((1, tokens, 1), fill, np.float32)
    return KVBlock((array,), (array.copy(),))


def chain(path: Path) -> tuple[bytes, ...]:
    """One key for each leading part of the path."""
    return tuple(bytes(path[: i + 1]) for i in range(len(path)))


def held(store: BlockStore) -> list[bytes]:
    return [key for key, _ in store.items()]


def test_keys_are_chained_sha256_of_little_endian_tokens() -> None:
    root = root_key(b"regime")
    first = chain_key(root, [1, 2**40])
    second = chain_key(first, [3, 4])
    raw = (1).to_bytes(8, "little") + (2**40).to_bytes(8, "little")
    assert first == sha256(root + raw).digest()
    raw = (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    assert second == sha256(first + raw).digest()


def test_equal_tokens_after_another_prefix_or_regime_have_another_key() -> None:
    short, long = root_key(b"short"), root_key(b"long")
    assert chain_key(short, [1]) != chain_key(long, [1])
    assert chain_key(chain_key(short, [1]), [9]) != chain_key(chain_key(short, [2]), [9])


def test_match_gives_the_longest_kept_prefix() -> None:
    store = BlockStore(10 * BLOCK)
    blocks = [block(fill=i) for i in range(3)]
    assert store.put(chain((1, 2, 3)), blocks) == 3
    assert store.match(chain((1, 2, 9))) == tuple(blocks[:2])
    assert store.match(chain((9,))) == ()
    assert store.count(chain((1, 2, 3, 4))) == 3


def test_least_recently_matched_goes_first() -> None:
    store = BlockStore(3 * BLOCK)
    for path in ((1,), (2,), (3,)):
        store.put(chain(path), [block()])
    store.match(chain((1,)))
    store.put(chain((4,)), [block()])
    assert set(held(store)) == {b"\x01", b"\x03", b"\x04"}


def test_counting_is_not_touching() -> None:
    store = BlockStore(2 * BLOCK)
    store.put(chain((1,)), [block()])
    store.put(chain((2,)), [block()])
    store.count(chain((1,)))
    store.put(chain((3,)), [block()])
    assert set(held(store)) == {b"\x02", b"\x03"}


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    store = BlockStore(3 * BLOCK)
    store.put(chain((1, 2)), [block(), block()])
    store.put(chain((5,)), [block()])
    store.put(chain((6,)), [block()])
    assert set(held(store)) == {b"\x01", b"\x05", b"\x06"}


def test_touching_a_child_keeps_its_parents() -> None:
    store = BlockStore(3 * BLOCK)
    store.put(chain((1, 2)), [block(), block()])
    store.put(chain((5,)), [block()])
    store.match(chain((1, 2)))
    store.put(chain((6,)), [block()])
    assert set(held(store)) == {b"\x01", bytes((1, 2)), b"\x06"}


def test_a_chain_longer_than_the_limit_keeps_its_beginning() -> None:
    store = BlockStore(2 * BLOCK)
    store.put(chain((9,)), [block()])
    assert store.put(chain((1, 2, 3)), [block()] * 3) == 2
    assert set(held(store)) == {b"\x01", bytes((1, 2))}


def test_a_block_without_its_parent_is_refused() -> None:
    store = BlockStore(4 * BLOCK)
    assert store.put(chain((1, 2)), [block()]) == 0
    assert len(store) == 0


def test_a_block_larger_than_the_limit_is_refused_and_evicts_nothing() -> None:
    store = BlockStore(2 * BLOCK)
    store.put(chain((1,)), [block()])
    assert store.put(chain((2,)), [block(tokens=3)]) == 0
    assert held(store) == [b"\x01"]


def test_limit_zero_keeps_nothing() -> None:
    store = BlockStore(0)
    assert store.put(chain((1,)), [block()]) == 0
    assert (len(store), store.nbytes) == (0, 0)


def test_evict_and_clear_account_for_what_they_drop() -> None:
    store = BlockStore(9 * BLOCK)
    store.put(chain((1, 2)), [block(tokens=2), block(tokens=3)])
    assert store.evict()
    assert (held(store), store.nbytes) == ([b"\x01"], 2 * BLOCK)
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)
    assert not store.evict()


class SlowStore:
    """The same rules, word for word, on a list from least to most recently used."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.paths: list[Path] = []

    def count(self, path: Path) -> int:
        return next((i for i in range(len(path)) if path[: i + 1] not in self.paths), len(path))

    def touch(self, path: Path) -> None:
        for length in range(self.count(path), 0, -1):
            self.paths.remove(path[:length])
            self.paths.append(path[:length])

    def put(self, path: Path, new: int) -> int:
        own = [path[: i + 1] for i in range(len(path))]
        self.touch(path[: len(path) - new])
        for part in own[len(path) - new :]:
            if part in self.paths:
                continue
            if len(part) > 1 and part[:-1] not in self.paths:
                break
            while len(self.paths) >= self.limit and any(p not in own for p in self.paths):
                self.paths.remove(next(p for p in self.paths if p not in own))
            if len(self.paths) >= self.limit:
                break
            self.paths.append(part)
        self.touch(path)
        return self.count(path)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    limit=st.integers(0, 6),
    steps=st.lists(st.tuples(st.sampled_from(["put", "match", "evict"]), paths), max_size=25),
    data=st.data(),
)
def test_store_equals_the_slow_one(
    limit: int, steps: list[tuple[str, Path]], data: st.DataObject
) -> None:
    store, slow = BlockStore(limit * BLOCK + 3), SlowStore(limit)
    for action, path in steps:
        if action == "put":
            new = data.draw(st.integers(1, len(path)))
            assert store.put(chain(path), [block()] * new) == slow.put(path, new)
        elif action == "match":
            assert len(store.match(chain(path))) == slow.count(path)
            slow.touch(path)
        else:
            assert store.evict() == bool(slow.paths)
            slow.paths = slow.paths[1:]
        assert held(store) == [bytes(p) for p in slow.paths]
        assert store.nbytes == BLOCK * len(slow.paths) <= store.limit_bytes
        assert all(p[:-1] in slow.paths for p in slow.paths if len(p) > 1)


@pytest.mark.parametrize("new", [1, 2])
def test_putting_what_is_there_keeps_the_first_copy(new: int) -> None:
    store = BlockStore(4 * BLOCK)
    old = [block(fill=1), block(fill=2)]
    store.put(chain((1, 2)), old)
    assert store.put(chain((1, 2)), [block(fill=9)] * new) == 2
    assert store.match(chain((1, 2))) == tuple(old)
    assert store.nbytes == 2 * BLOCK
