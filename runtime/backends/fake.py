"""A deterministic toy model behind the session protocol: for tests, docs and trying things out.

Its K and V are small whole numbers in a real pool, and its logits are a hash of the
position-weighted sum of everything that the row has cached, in exact arithmetic. So any way of
computing the same tokens gives bit-equal logits, and any slip of the books (a slot mixed up, a
wrong length, a forgotten move, a stale block, a wrong rope regime) gives other ones. Memory that
holds nothing is NaN, and reading it is an error.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.base import (
    Batch,
    DecodeCost,
    KVBlock,
    SessionInfo,
    SessionOptions,
)
from trtllm_lite.runtime.backends.contract import check_batch
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import StepError

LAYERS, HEADS, DIM = 2, 2, 2
EMBED = 251
"""K and V entries are below EMBED in the short regime and at or above it in the long one."""
PRIME = 1_048_573

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class FakeModel:
    """The arithmetic alone: embeddings [vocab, LAYERS, 2, HEADS, DIM] and a hash to logits."""

    def __init__(self, vocab_size: int, recompute_at: int | None = None) -> None:
        rng = np.random.default_rng(0)
        self.vocab_size = vocab_size
        self._recompute_at = recompute_at
        self._embedding = rng.integers(0, EMBED, (vocab_size, LAYERS, 2, HEADS, DIM))
        self._weights = rng.integers(1, 64, (LAYERS, 2, HEADS, 1, DIM))
        self._scale = rng.integers(1, PRIME, vocab_size)
        self._shift = rng.integers(0, PRIME, vocab_size)

    def keys_values(self, token_ids: I64, context_len: int) -> F32:
        """K and V [LAYERS, 2, HEADS, tokens, DIM] of tokens of a row of `context_len` tokens."""
        limit = self._recompute_at
        offset = EMBED if limit is not None and context_len > limit else 0
        entries = self._embedding[token_ids] + offset
        return np.moveaxis(entries, 0, 3).astype(np.float32)

    def logits(self, cache: F32, positions: I64) -> F32:
        """Logits [positions, vocab] after each position, from a row's cache (as `keys_values`)."""
        place = np.arange(cache.shape[3]) * 7919 % 4093 + 1
        tokens = (cache.astype(np.int64) * self._weights).sum(axis=(0, 1, 2, 4))
        state = np.cumsum(tokens * place)[positions] % PRIME
        hashed = (state[:, None] * self._scale + self._shift) % PRIME
        logits: F32 = (hashed * (16.0 / PRIME) - 8.0).astype(np.float32)
        return logits


class FakeSession:
    """`Session` of a `FakeModel`. Everything runs on the calling thread, so thread options do not
    apply. Raises StepError for whatever breaks the contract of `backends/base.py`."""

    def __init__(
        self,
        options: SessionOptions,
        *,
        vocab_size: int = 61,
        recompute_at: int | None = None,
        multi_token_decode: bool = True,
    ) -> None:
        self.model = FakeModel(vocab_size, recompute_at)
        self._options = options
        self._multi_token_decode = multi_token_decode
        shape = (options.num_slots, LAYERS, 2, HEADS, options.capacity, DIM)
        self._pool = np.full(shape, np.nan, np.float32)
        self._logits: F32 | None = None
        self._faults: list[Exception] = []
        self._closed = False

    @property
    def info(self) -> SessionInfo:
        size = LAYERS * 2 * HEADS * DIM * 4
        return SessionInfo(
            "fake",
            "cpu",
            1,
            size,
            self._multi_token_decode,
            decode_cost=DecodeCost(0.1),
            shape_invariant=True,
        )

    def reference(self, token_ids: Sequence[int]) -> F32:
        """Logits [vocab] of the token after `token_ids`, computed from nothing else."""
        tokens = np.asarray(token_ids, np.int64)
        cache = self.model.keys_values(tokens, len(tokens))
        logits: F32 = self.model.logits(cache, np.array([len(tokens) - 1]))[0]
        return logits

    def fail_next(self, n: int = 1, error: Exception | None = None) -> None:
        """Let the next `n` runs raise `error` before they touch anything."""
        self._faults = [error or RuntimeError("injected fault")] * n

    def run(self, batch: Batch) -> F32:
        self._check_open()
        if self._faults:
            raise self._faults.pop()
        vocab, multi = self.model.vocab_size, self._multi_token_decode
        check_batch(batch, self._options, vocab, multi_token_decode=multi)
        if self._logits is not None:
            self._logits.fill(np.nan)
        self._logits = np.stack([self._run_row(batch, row) for row in range(batch.rows)])
        return self._logits

    def interrupt(self) -> None:
        """Runs are over before anybody could."""

    def move(self, source: int, target: int, length: int) -> None:
        self._put(target, 0, self._held(source, 0, length).copy())

    def swap(self, a: int, b: int, length: int) -> None:
        self._check_open()
        kept = self._pool[a, ..., :length, :].copy()
        self._put(a, 0, self._pool[b, ..., :length, :].copy())
        self._put(b, 0, kept)

    def read(self, slot: int, spans: Sequence[tuple[int, int]]) -> list[KVBlock]:
        blocks = []
        for start, stop in spans:
            held = self._held(slot, start, stop)
            keys, values = (tuple(layer[kind].copy() for layer in held) for kind in (0, 1))
            blocks.append(KVBlock(keys, values))
        return blocks

    def write(self, slot: int, start: int, blocks: Sequence[KVBlock]) -> None:
        for block in blocks:
            pairs = zip(block.keys, block.values, strict=True)
            self._put(slot, start, np.stack([np.stack(pair) for pair in pairs]))
            start += block.num_tokens

    def release(self, slot: int) -> None:
        self._check_open()
        self._pool[slot] = np.nan

    def close(self) -> None:
        self._closed = True
        self._pool = np.empty((0, LAYERS, 2, HEADS, 0, DIM), np.float32)

    def _run_row(self, batch: Batch, row: int) -> F32:
        slot, past = batch.first_slot + row, int(batch.past_lens[row])
        query = int(batch.query_lens[row])
        tokens = batch.token_ids[row, :query]
        entries = self.model.keys_values(tokens, int(batch.context_lens[row]))
        self._put(slot, past, entries)
        cache = self._held(slot, 0, past + query)
        return self.model.logits(cache, past + batch.logits_indices[row])

    def _put(self, slot: int, start: int, entries: F32) -> None:
        """Write tokens from `start` on. What lies behind them holds nothing any more."""
        self._check_open()
        stop = start + entries.shape[3]
        if stop > self._options.capacity:
            raise StepError(f"slot {slot} cannot hold {stop} tokens")
        self._pool[slot, ..., start:stop, :] = entries
        self._pool[slot, ..., stop:, :] = np.nan

    def _held(self, slot: int, start: int, stop: int) -> F32:
        """A view of tokens that must have been written."""
        self._check_open()
        held = self._pool[slot, ..., start:stop, :]
        if held.shape[3] != stop - start or np.isnan(held).any():
            raise StepError(f"slot {slot} does not hold all of the tokens {start} to {stop - 1}")
        return held

    def _check_open(self) -> None:
        if self._closed:
            raise StepError("the session is closed")


def open_session(bundle: Bundle, options: SessionOptions) -> FakeSession:
    """A fake session with the vocabulary, the rope regimes and the decode form of a bundle."""
    facts = bundle.manifest
    return FakeSession(
        options,
        vocab_size=facts.model.vocab_size,
        recompute_at=facts.kv.recompute_at,
        multi_token_decode=facts.graph("decode").is_multi_token,
    )
