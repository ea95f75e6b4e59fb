"""Each check passes on a session that computes rightly, and fails on the slip it is there for."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from trtllm_lite.runtime.backends.base import Batch, KVBlock, SessionOptions
from trtllm_lite.runtime.backends.fake import F32, FakeModel, FakeSession
from trtllm_lite.tools.doctor_checks.bench import Check, Facts
from trtllm_lite.tools.doctor_checks.drive import Logits
from trtllm_lite.tools.doctor_checks.logits_checks import (
    BehindTheLength,
    OneRow,
    PiecesOverCache,
    RaggedRows,
)
from trtllm_lite.tools.doctor_checks.memory_checks import Copies, InPlace, SameAsGraphs
from trtllm_lite.tools.doctor_checks.result import CheckResult, judged
from trtllm_lite.tools.doctor_checks.speed_checks import CONCURRENCY, Throughput, TimePerToken

VOCAB = 61
SLOTS, CAPACITY = 8, 512
FACTS = Facts("fake", VOCAB, SLOTS, CAPACITY, "float16", weight_bytes=10**6, kv_bytes=100)
CORRECTNESS: tuple[Check, ...] = (
    *(OneRow(), RaggedRows(), PiecesOverCache(), BehindTheLength()),
    *(InPlace(), Copies(), SameAsGraphs()),
)


class Session(FakeSession):
    """The toy model with room for a slip."""

    def __init__(self) -> None:
        super().__init__(SessionOptions(num_slots=SLOTS, capacity=CAPACITY), vocab_size=VOCAB)


class Reference:
    """The arithmetic of the toy model, on nothing but the row."""

    def __init__(self) -> None:
        self._model = FakeModel(VOCAB)

    def logits(self, row: Sequence[int]) -> Logits:
        cache = self._cache(row)
        return self._model.logits(cache, np.arange(len(row)))

    def keys_values(self, row: Sequence[int]) -> KVBlock:
        cache = self._cache(row)
        return KVBlock(tuple(c[0] for c in cache), tuple(c[1] for c in cache))

    def _cache(self, row: Sequence[int]) -> F32:
        return self._model.keys_values(np.array(row, np.int64), len(row))


@dataclass
class Bench:
    subject: Session
    facts: Facts = FACTS

    @property
    def reference(self) -> Reference:
        return Reference()


def result_of(check: Check, session: Session, facts: Facts = FACTS) -> CheckResult:
    return judged(check.name, "fake", lambda: check.run(Bench(session, facts)))


class UpperLeft(Session):
    """A piece over the cache sees as many tokens as if it were the beginning of the row."""

    def _run_row(self, batch: Batch, row: int) -> F32:
        past, query = int(batch.past_lens[row]), int(batch.query_lens[row])
        logits = super()._run_row(batch, row)
        if past and query > 1:
            cache = self._held(batch.first_slot + row, 0, past + query)
            logits = self.model.logits(cache, batch.logits_indices[row])
        return logits


class DroppedLengths(Session):
    """Attention over the whole slot, whatever the row holds."""

    def _run_row(self, batch: Batch, row: int) -> F32:
        slot = write_only(self, batch, row)
        count = 1 if batch.past_lens[row] == 0 else len(batch.logits_indices[row])
        cache = np.nan_to_num(self._pool[slot], nan=0.0)
        return self.model.logits(cache, np.full(count, cache.shape[3] - 1))


class OneLengthForAll(Session):
    """Decode takes the first row's length for every row."""

    def _run_row(self, batch: Batch, row: int) -> F32:
        if batch.phase == "prefill" or row == 0:
            return super()._run_row(batch, row)
        slot, length = write_only(self, batch, row), int(batch.past_lens[0]) + 1
        cache = np.nan_to_num(self._pool[slot, ..., :length, :], nan=0.0)
        return self.model.logits(cache, np.array([length - 1]))


def write_only(session: Session, batch: Batch, row: int) -> int:
    """Put the K and V of a row into its slot, and touch nothing behind them."""
    slot, past = batch.first_slot + row, int(batch.past_lens[row])
    query = int(batch.query_lens[row])
    entries = session.model.keys_values(batch.token_ids[row, :query], query)
    session._pool[slot, ..., past : past + query, :] = entries
    return slot


class OutOfPlace(Session):
    """Decode writes its K and V to memory of its own."""

    def run(self, batch: Batch) -> F32:
        before = self._pool.copy()
        logits = super().run(batch)
        if batch.phase == "decode":
            self._pool[:] = before
        return logits

    def _held(self, slot: int, start: int, stop: int) -> F32:
        return np.nan_to_num(self._pool[slot, ..., start:stop, :], nan=0.0)


class WritesEverywhere(Session):
    """Decode writes into a slot that is not in the run."""

    def run(self, batch: Batch) -> F32:
        logits = super().run(batch)
        if batch.phase == "decode":
            self._pool[2, ..., 0, :] += 1.0
        return logits


class ShiftsTheOld(Session):
    """Decode changes the first token of its own row; its logits are still right."""

    def _run_row(self, batch: Batch, row: int) -> F32:
        logits = super()._run_row(batch, row)
        if batch.phase == "decode":
            self._pool[batch.first_slot + row, ..., 0, :] += 1.0
        return logits


class FirstRowForAll(Session):
    """Every row gets the logits of the first."""

    def run(self, batch: Batch) -> F32:
        logits = super().run(batch)
        logits[1:] = logits[:1]
        return logits


class NoSwap(Session):
    def swap(self, a: int, b: int, length: int) -> None:
        """Forgotten."""


class NoMove(Session):
    def move(self, source: int, target: int, length: int) -> None:
        """Forgotten."""


class WritesLate(Session):
    """Blocks land one token too far."""

    def write(self, slot: int, start: int, blocks: Sequence[KVBlock]) -> None:
        kept = self._pool[slot, ..., start : start + 1, :].copy()
        super().write(slot, start + 1, blocks)
        self._pool[slot, ..., start : start + 1, :] = kept


class NotANumber(Session):
    def run(self, batch: Batch) -> F32:
        logits = super().run(batch)
        logits[0, 0, 3] = np.nan
        return logits


class Noisy(Session):
    """Wrong by a part of the largest logit."""

    def __init__(self, part: float) -> None:
        super().__init__()
        self._part = part

    def run(self, batch: Batch) -> F32:
        logits = super().run(batch)
        logits[:, :, 0] += self._part * np.abs(logits).max()
        return logits


class Raises(Session):
    def run(self, batch: Batch) -> F32:
        raise RuntimeError("an illegal memory access\nwas encountered")


@pytest.mark.parametrize("check", CORRECTNESS, ids=lambda c: c.name)
def test_a_right_session_passes(check: Check) -> None:
    result = result_of(check, Session())
    assert (result.status, result.reason) == ("passed", "")
    distances = {n: v for n, v in result.numbers.items() if n.endswith("distance")}
    assert set(distances.values()) <= {0.0}


@pytest.mark.parametrize(
    ("slip", "check", "said"),
    [
        (UpperLeft, PiecesOverCache(), "first_token_distance"),
        (UpperLeft, BehindTheLength(), "piece_distance"),
        (DroppedLengths, BehindTheLength(), "prompt_distance"),
        (OneLengthForAll, RaggedRows(), "decode_distance"),
        (OneLengthForAll, BehindTheLength(), "decode_distance"),
        (OutOfPlace, OneRow(), "decode_distance"),
        (OutOfPlace, InPlace(), "slot_0_distance"),
        (WritesEverywhere, InPlace(), "changed slot 2"),
        (ShiftsTheOld, InPlace(), "changed tokens that were there before"),
        (FirstRowForAll, RaggedRows(), "prompt_distance"),
        (NoSwap, Copies(), "a swap lost"),
        (NoMove, Copies(), "a move did not copy"),
        (WritesLate, Copies(), "blocks read and written are others"),
        (NotANumber, OneRow(), "prompt_distance is inf"),
        (lambda: Noisy(0.03), OneRow(), "prompt_distance is 0.03"),
        (Raises, OneRow(), "RuntimeError: an illegal memory access was encountered"),
    ],
)
def test_a_slip_is_found(slip: Callable[[], Session], check: Check, said: str) -> None:
    result = result_of(check, slip())
    assert result.status == "failed"
    assert said in result.reason


def test_roundings_are_no_slip() -> None:
    assert result_of(OneRow(), Noisy(0.01)).status == "passed"
    assert result_of(OneRow(), Noisy(0.01), replace(FACTS, dtype="float32")).status == "failed"


def test_a_model_that_cannot_tell_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are the same whatever the first token was."""
    monkeypatch.setattr(Reference, "logits", lambda self, row: np.ones((len(row), VOCAB)))
    result = result_of(OneRow(), Session())
    assert "too insensitive" in result.reason


@pytest.mark.parametrize("slots", [1, 2])
def test_few_slots_are_used_or_the_check_says_so(slots: int) -> None:
    facts = replace(FACTS, num_slots=slots)
    for check in CORRECTNESS:
        result = result_of(check, Session(), facts)
        assert result.status == ("passed" if result.reason == "" else "skipped")
        assert result.status == "passed" or "slot" in result.reason


class OtherWhenRepeated(Session):
    """The second run from slot 0 on of so many rows is another one, in the last bit of a logit."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()

    def run(self, batch: Batch) -> F32:
        logits = super().run(batch)
        if batch.phase == "decode" and batch.first_slot == 0:
            if batch.rows in self._seen:
                logits[-1, 0, 5] = np.nextafter(logits[-1, 0, 5], np.float32(100.0))
            self._seen.add(batch.rows)
        return logits


def test_graphs_are_compared_bit_by_bit() -> None:
    right = result_of(SameAsGraphs(), Session())
    assert (right.status, right.numbers) == (
        "passed",
        {"steps_compared": 12.0, "steps_equal": 12.0},
    )
    wrong = result_of(SameAsGraphs(), OtherWhenRepeated())
    assert wrong.status == "failed"
    assert "other logits from slot 0 on: 1 rows, step 1, row 0" in wrong.reason


class OldTokens(Session):
    """The second run from slot 0 on of so many rows is the first one again."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: dict[int, F32] = {}

    def run(self, batch: Batch) -> F32:
        logits = super().run(batch)
        if batch.phase == "decode" and batch.first_slot == 0:
            return self._recorded.setdefault(batch.rows, logits.copy())
        return logits


def test_graphs_of_other_kernels_are_compared_as_arithmetic() -> None:
    facts = replace(FACTS, exact_graphs=False)
    rounded = result_of(SameAsGraphs(), OtherWhenRepeated(), facts)
    assert rounded.status == "passed"
    assert 0 < rounded.numbers["largest_distance"] < 1e-5
    assert rounded.numbers["steps_equal"] == 3.0
    stale = result_of(SameAsGraphs(), OldTokens(), facts)
    assert (stale.status, "largest_distance" in stale.reason) == ("failed", True)


def test_warnings_come_with_the_result() -> None:
    def check() -> dict[str, float]:
        for _ in range(2):
            logging.getLogger("trtllm_lite.runtime.x").warning("decode runs without %s", "graphs")
        return {}

    assert judged("x", "y", check).notes == ("decode runs without graphs",)
    assert judged("x", "y", dict).notes == ()


class Ticks:
    """A clock that goes on by the same time at each look."""

    def __init__(self, step: float) -> None:
        self._step, self._now = step, 0.0

    def __call__(self) -> float:
        self._now += self._step
        return self._now


def test_time_per_token_against_the_limit() -> None:
    facts = replace(FACTS, bandwidth=1e9)
    numbers = TimePerToken(Ticks(0.004)).run(Bench(Session(), facts))
    read = 10**6 + 100 * (128 + 8 + 32)
    assert numbers["tpot_ms"] == pytest.approx(4.0)
    assert numbers["tpot_without_graphs_ms"] == pytest.approx(4.0)
    assert numbers["bytes_per_step"] == read
    assert numbers["limit_ms"] == pytest.approx(read / 1e6)
    assert numbers["fraction_of_bandwidth"] == pytest.approx(read / 1e9 / 0.004)
    unknown = TimePerToken(Ticks(0.004)).run(Bench(Session()))
    assert "limit_ms" not in unknown


def test_steps_faster_than_memory_are_no_steps() -> None:
    facts = replace(FACTS, bandwidth=1e9)
    check = TimePerToken(Ticks(0.0005))
    result = judged("x", "y", lambda: check.run(Bench(Session(), facts)))
    assert result.status == "failed"
    assert "less time than memory needs" in result.reason


def test_throughput_counts_every_token() -> None:
    for count in (n for n in CONCURRENCY if n <= SLOTS):
        numbers = Throughput(count, Ticks(2.0)).run(Bench(Session(), FACTS))
        assert numbers == {"tokens_per_s": count * 64 / 2.0}


def test_more_requests_than_slots_are_not_timed() -> None:
    result = result_of(Throughput(SLOTS + 1), Session())
    assert (result.status, result.reason) == ("skipped", f"the session has {SLOTS} slots")


def test_throughput_of_steps_that_fail() -> None:
    session = Session()
    session.fail_next()
    result = result_of(Throughput(1), session)
    assert result.status == "failed"
    assert "a step failed with 1 requests" in result.reason


@pytest.mark.parametrize("check", [TimePerToken(), Throughput(1)], ids=lambda c: c.name)
def test_small_slots_are_not_timed(check: Check) -> None:
    result = result_of(check, Session(), replace(FACTS, capacity=60))
    assert result.status == "skipped"
    assert "holds 60 tokens" in result.reason
