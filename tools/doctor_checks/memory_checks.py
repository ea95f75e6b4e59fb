"""Whether the KV cache is where it has to be: written in place, and nowhere else; copied rightly;
and whether a recorded CUDA graph does what the kernels one by one do."""

import numpy as np

from trtllm_lite.runtime.backends.base import Array, KVBlock, Session
from trtllm_lite.tools.doctor_checks import drive
from trtllm_lite.tools.doctor_checks.bench import Bench, Facts, distance, farthest, within
from trtllm_lite.tools.doctor_checks.result import CheckFailedError, CheckSkippedError, Numbers

LENGTH = 14
STEPS = 4


def as_float(array: Array) -> Array:
    """Values of a cache as float32; bfloat16 is held as its 16 bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def block_distance(found: KVBlock, wanted: KVBlock) -> float:
    """The largest difference over all layers, each as a part of its largest magnitude."""
    worst = 0.0
    pairs = zip((*found.keys, *found.values), (*wanted.keys, *wanted.values), strict=True)
    for a, b in pairs:
        x, y = as_float(a), as_float(b)
        if x.shape != y.shape or not np.isfinite(x).all():
            return float("inf")
        worst = max(worst, float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)))
    return worst


def same(a: KVBlock, b: KVBlock) -> bool:
    """Whether two blocks are equal bit by bit."""
    pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


class InPlace:
    """After a prompt and decode steps the slots hold the reference's K and V; steps change neither
    earlier tokens of their own slots nor any other slot."""

    name = "KV cache in place"
    expected_s, budget_s = 3.0, 30.0

    def run(self, bench: Bench) -> Numbers:
        facts, numbers = bench.facts, Numbers()
        if facts.num_slots < 3:
            raise CheckSkippedError("the session has fewer than three slots")
        rows = [drive.random_row(40 + i, LENGTH + STEPS, facts.vocab_size) for i in range(2)]
        session = bench.subject
        other = drive.random_row(50, LENGTH, facts.vocab_size)
        drive.prompt(session, [other], first_slot=2)
        untouched = _held(session, 2, LENGTH)
        drive.prompt(session, [row[:LENGTH] for row in rows])
        before = [_held(session, slot, LENGTH) for slot in range(2)]
        for n in range(LENGTH, LENGTH + STEPS):
            drive.decode(session, [row[n] for row in rows], [n, n])
        if not all(same(a, _held(session, slot, LENGTH)) for slot, a in enumerate(before)):
            raise CheckFailedError("decode steps changed tokens that were there before", numbers)
        if not same(untouched, _held(session, 2, LENGTH)):
            raise CheckFailedError("a run over slots 0 and 1 changed slot 2", numbers)
        for slot, row in enumerate(rows):
            wanted = bench.reference.keys_values(row)
            found = _held(session, slot, LENGTH + STEPS)
            within(facts, f"slot_{slot}_distance", block_distance(found, wanted), numbers)
        return numbers


class Copies:
    """Slots moved, swapped, read out and put back hold what they held, and go on from it."""

    name = "copies of the KV cache"
    expected_s, budget_s = 3.0, 30.0

    def run(self, bench: Bench) -> Numbers:
        facts, session = bench.facts, bench.subject
        if facts.num_slots < 2:
            raise CheckSkippedError("the session has one slot")
        rows = [drive.random_row(60 + i, LENGTH + 1, facts.vocab_size) for i in range(2)]
        drive.prompt(session, [row[:LENGTH] for row in rows])
        first, second = (_held(session, slot, LENGTH) for slot in range(2))
        session.swap(0, 1, LENGTH)
        _expect(same(first, _held(session, 1, LENGTH)), "a swap lost the first slot")
        _expect(same(second, _held(session, 0, LENGTH)), "a swap lost the second slot")
        session.move(1, 0, LENGTH)
        _expect(same(first, _held(session, 0, LENGTH)), "a move did not copy its slot")
        drive.prompt(session, [rows[1][:3]])
        session.write(0, 0, session.read(1, [(0, 5), (5, LENGTH)]))
        _expect(same(first, _held(session, 0, LENGTH)), "blocks read and written are others")
        numbers = Numbers()
        found = drive.decode(session, [rows[0][LENGTH]], [LENGTH])
        wanted = bench.reference.logits(rows[0])[-1:]
        within(facts, "decode_distance", distance(found[0], wanted), numbers)
        return numbers


class SameAsGraphs:
    """Decode steps from slot 0 on, which become CUDA graphs, give bit by bit the logits of the same
    steps in further slots, which never do; also when a graph is used again with other tokens. Where
    the kernels are others, the difference is one of arithmetic."""

    name = "CUDA graphs change nothing"
    expected_s, budget_s = 5.0, 60.0
    rows = (1, 2, 3, 16)

    def run(self, bench: Bench) -> Numbers:
        facts, numbers = bench.facts, Numbers()
        counts = [count for count in self.rows if 2 * count <= facts.num_slots]
        if not counts:
            raise CheckSkippedError("the session has one slot")
        steps = [step for count in counts for step in self._compare(bench.subject, count, facts)]
        numbers["steps_compared"] = float(len(steps))
        numbers["steps_equal"] = float(sum(moved == 0.0 for moved in steps))
        if not facts.exact_graphs:
            within(facts, "largest_distance", max(steps), numbers)
        return numbers

    def _compare(self, session: Session, count: int, facts: Facts) -> list[float]:
        """The largest distance of any row's logits, step by step."""
        rows = [drive.random_row(70 + i, LENGTH + STEPS, facts.vocab_size) for i in range(count)]
        for first_slot in (0, count):
            drive.prompt(session, [row[:LENGTH] for row in rows], first_slot=first_slot)
        moved = []
        for n in range(LENGTH, LENGTH + STEPS):
            tokens, past = [row[n] for row in rows], [n] * count
            found = drive.decode(session, tokens, past)
            wanted = drive.decode(session, tokens, past, first_slot=count)
            equal = [a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True)]
            if facts.exact_graphs and not all(equal):
                where = f"{count} rows, step {n - LENGTH}, row {equal.index(False)}"
                raise CheckFailedError(f"other logits from slot 0 on: {where}")
            moved.append(0.0 if all(equal) else farthest(found, wanted))
        return moved


def _held(session: Session, slot: int, length: int) -> KVBlock:
    return session.read(slot, [(0, length)])[0]


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailedError(otherwise)
