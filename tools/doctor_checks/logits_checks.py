"""Whether the logits are those of the model: one row, ragged rows, pieces over the cache, and
whatever lies behind a row's length."""

from collections.abc import Sequence

import numpy as np

from trtllm_lite.runtime.backends.base import Array, KVBlock, Session
from trtllm_lite.tools.doctor_checks import drive
from trtllm_lite.tools.doctor_checks.bench import (
    SENSITIVITY,
    Bench,
    distance,
    farthest,
    within,
)
from trtllm_lite.tools.doctor_checks.result import CheckFailedError, CheckSkippedError, Numbers

STEPS = 6
GARBAGE = 50.0
"""Finite in every type of a KV cache, and far from what a model writes there."""


class OneRow:
    """A prompt and some decode steps of one row against the reference's logits. As the first check
    of a job it opens the session and loads the reference."""

    name = "logits of one row"
    expected_s, budget_s = 15.0, 90.0

    def run(self, bench: Bench) -> Numbers:
        facts, numbers = bench.facts, Numbers()
        row = drive.random_row(1, 17 + STEPS, facts.vocab_size)
        wanted = bench.reference.logits(row)
        self._check_sensitivity(bench, row, wanted, numbers)
        found = drive.prompt(bench.subject, [row[:17]])
        within(facts, "prompt_distance", farthest(found, [wanted[16:17]]), numbers)
        steps = [drive.decode(bench.subject, [row[n]], [n])[0] for n in range(17, len(row))]
        within(facts, "decode_distance", distance(np.concatenate(steps), wanted[17:]), numbers)
        return numbers

    def _check_sensitivity(
        self, bench: Bench, row: list[int], wanted: drive.Logits, numbers: Numbers
    ) -> None:
        """Equal logits prove nothing where the first token does not matter to the last logits."""
        other = [(row[0] + 1) % bench.facts.vocab_size, *row[1:]]
        moved = distance(bench.reference.logits(other)[-1:], wanted[-1:])
        numbers["sensitivity"] = moved
        if moved < SENSITIVITY * bench.facts.limit:
            raise CheckFailedError("the model is too insensitive to prove anything", numbers)


class RaggedRows:
    """Prompts of different lengths in one run, then decode steps at as many different lengths."""

    name = "logits of ragged rows"
    expected_s, budget_s = 3.0, 60.0
    lengths = (1, 23, 5, 12)

    def run(self, bench: Bench) -> Numbers:
        facts, numbers = bench.facts, Numbers()
        lengths = self.lengths[: facts.num_slots]
        if len(lengths) < 2:
            raise CheckSkippedError("the session has one slot")
        rows = [drive.random_row(10 + n, n + STEPS, facts.vocab_size) for n in lengths]
        wanted = [bench.reference.logits(row) for row in rows]
        found = drive.prompt(bench.subject, [r[:n] for r, n in zip(rows, lengths, strict=True)])
        last = [w[n - 1 : n] for w, n in zip(wanted, lengths, strict=True)]
        within(facts, "prompt_distance", farthest(found, last), numbers)
        within(facts, "decode_distance", self._decode(bench.subject, rows, wanted), numbers)
        return numbers

    def _decode(
        self, session: Session, rows: list[list[int]], wanted: Sequence[drive.Logits]
    ) -> float:
        worst = 0.0
        for step in range(STEPS):
            past = [len(row) - STEPS + step for row in rows]
            tokens = [row[n] for row, n in zip(rows, past, strict=True)]
            found = drive.decode(session, tokens, past)
            worst = max(
                worst, farthest(found, [w[n : n + 1] for w, n in zip(wanted, past, strict=True)])
            )
        return worst


class PiecesOverCache:
    """Rows that go on from different lengths with pieces of different lengths: the causal mask
    must be aligned with each row's last token, not with its first."""

    name = "pieces over the cache (LOWER_RIGHT)"
    expected_s, budget_s = 3.0, 30.0
    past = (7, 2, 11)
    pieces = (3, 6, 5)

    def run(self, bench: Bench) -> Numbers:
        facts, numbers = bench.facts, Numbers()
        past, pieces = self.past[: facts.num_slots], self.pieces[: facts.num_slots]
        rows = [
            drive.random_row(20 + i, p + n, facts.vocab_size)
            for i, (p, n) in enumerate(zip(past, pieces, strict=True))
        ]
        wanted = [bench.reference.logits(row) for row in rows]
        drive.prompt(bench.subject, [row[:p] for row, p in zip(rows, past, strict=True)])
        rest = [row[p:] for row, p in zip(rows, past, strict=True)]
        found = drive.extend(bench.subject, rest, past, every=True)
        after = [w[p:] for w, p in zip(wanted, past, strict=True)]
        first = farthest([f[:1] for f in found], [w[:1] for w in after])
        within(facts, "first_token_distance", first, numbers)
        within(facts, "piece_distance", farthest(found, after), numbers)
        return numbers


class BehindTheLength:
    """Slots full of other values behind each row's length must not change its logits, neither in a
    prompt nor in decode steps of rows of different lengths."""

    name = "nothing behind a row's length is seen (key_value_lengths)"
    expected_s, budget_s = 3.0, 30.0
    lengths = (9, 3)

    def run(self, bench: Bench) -> Numbers:
        facts, numbers = bench.facts, Numbers()
        lengths = self.lengths[: facts.num_slots]
        rows = [drive.random_row(30 + n, n + STEPS, facts.vocab_size) for n in lengths]
        wanted = [bench.reference.logits(row) for row in rows]
        prompts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        self._spoil(bench, list(range(len(rows))), start=0)
        found = drive.prompt(bench.subject, prompts)
        last = [w[n - 1 : n] for w, n in zip(wanted, lengths, strict=True)]
        within(facts, "prompt_distance", farthest(found, last), numbers)
        for slot, n in enumerate(lengths):
            self._spoil(bench, [slot], start=n)
        tokens = [row[n] for row, n in zip(rows, lengths, strict=True)]
        found = drive.decode(bench.subject, tokens, lengths)
        after = [w[n : n + 1] for w, n in zip(wanted, lengths, strict=True)]
        within(facts, "decode_distance", farthest(found, after), numbers)
        for slot, n in enumerate(lengths):
            self._spoil(bench, [slot], start=n + 1)
        rest = [row[n + 1 :] for row, n in zip(rows, lengths, strict=True)]
        found = drive.extend(bench.subject, rest, [n + 1 for n in lengths])
        within(facts, "piece_distance", farthest(found, [w[-1:] for w in wanted]), numbers)
        return numbers

    def _spoil(self, bench: Bench, slots: list[int], *, start: int) -> None:
        """Fill slots from token `start` to the end of their memory."""
        session = bench.subject
        for slot in slots:
            like = session.read(slot, [(0, 1)])[0] if start else self._any_block(bench)
            count = bench.facts.capacity - start
            session.write(slot, start, [_filled(like, count)])

    def _any_block(self, bench: Bench) -> KVBlock:
        """A block of the subject's own shapes and types."""
        drive.prompt(bench.subject, [[0]])
        return bench.subject.read(0, [(0, 1)])[0]


def _filled(like: KVBlock, count: int) -> KVBlock:
    """A block of `count` tokens, all GARBAGE. bfloat16 is held as its 16 bits."""

    def fill(array: Array) -> Array:
        shape = (array.shape[0], count, array.shape[2])
        if array.dtype == np.uint16:
            return np.full(shape, np.float32(GARBAGE).view(np.uint32) >> 16, np.uint16)
        return np.full(shape, GARBAGE, array.dtype)

    return KVBlock(tuple(fill(a) for a in like.keys), tuple(fill(a) for a in like.values))
