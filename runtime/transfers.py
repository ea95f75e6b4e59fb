"""What happens to slot memory between runs, as data: the scheduler decides, `execute` does.

Transfers are ordered: each one refers to the slots as the ones before it have left them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trtllm_lite.runtime.backends.base import KVBlock, Session
from trtllm_lite.runtime.block_store import BlockStore

BLOCKS_PER_READ = 16


@dataclass(frozen=True)
class Move:
    """Copy the first `length` tokens of slot `source` over slot `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Swap:
    """Exchange the first `length` tokens of two slots."""

    a: int
    b: int
    length: int


@dataclass(frozen=True)
class Release:
    """The content of the slot is not needed any more."""

    slot: int


@dataclass(frozen=True)
class Load:
    """Put stored blocks into the slot, from its first token on."""

    slot: int
    blocks: tuple[KVBlock, ...]


@dataclass(frozen=True)
class Save:
    """Keep the leading full blocks of the slot: `keys` is their chain, from the first token on."""

    slot: int
    keys: tuple[bytes, ...]
    block_size: int


Transfer = Move | Swap | Release | Load | Save


def execute(transfers: Iterable[Transfer], session: Session, store: BlockStore) -> None:
    """Carry the transfers out, in order. What the session raises passes through."""
    for transfer in transfers:
        match transfer:
            case Move(source, target, length):
                session.move(source, target, length)
            case Swap(a, b, length):
                session.swap(a, b, length)
            case Release(slot):
                session.release(slot)
            case Load(slot, blocks):
                session.write(slot, 0, blocks)
            case Save():
                _save(transfer, session, store)


def _save(save: Save, session: Session, store: BlockStore) -> None:
    """Read what the store lacks, a few blocks at a time, so that copies stay few."""
    size = save.block_size
    first = store.count(save.keys)
    while first < len(save.keys):
        stop = min(first + BLOCKS_PER_READ, len(save.keys))
        blocks = session.read(save.slot, [(i * size, (i + 1) * size) for i in range(first, stop)])
        if store.put(save.keys[:stop], blocks) < stop:
            return
        first = stop
