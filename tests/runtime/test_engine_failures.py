"""What goes wrong stays with those whom it concerns, and nothing of it is kept."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.fake import FakeSession
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.engine import Engine
from trtllm_lite.runtime.errors import StepError
from trtllm_lite.runtime.outputs import TokenEvent
from trtllm_lite.runtime.request import Request
from trtllm_lite.runtime.sampling_params import SamplingParams

CONFIG = EngineConfig(4, 64, 32, 256, block_size=4, check_invariants=True)


class Faulty(FakeSession):
    """Calls `hook` with the name of what it is about to do, and with the batch of a run."""

    def __init__(self) -> None:
        super().__init__(SessionOptions(CONFIG.max_num_seqs, CONFIG.capacity))
        self.hook: Callable[[str, Batch | None], None] = lambda name, batch: None
        self.spoil: int | None = None
        self.released: list[int] = []

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        self.hook("run", batch)
        logits = super().run(batch)
        if self.spoil is not None:
            logits[self.spoil] = np.nan
        return logits

    def release(self, slot: int) -> None:
        self.released.append(slot)
        super().release(slot)

    def move(self, source: int, target: int, length: int) -> None:
        self.hook("move", None)
        super().move(source, target, length)

    def read(self, slot: int, spans: Any) -> Any:
        self.hook("read", None)
        return super().read(slot, spans)

    def write(self, slot: int, start: int, blocks: Any) -> None:
        self.hook("write", None)
        super().write(slot, start, blocks)


def failing(name: str, error: BaseException, phase: str | None = None) -> Any:
    def hook(what: str, batch: Batch | None) -> None:
        if what == name and (batch is None or phase in (None, batch.phase)):
            raise error

    return hook


class Serving:
    def __init__(self) -> None:
        self.session = Faulty()
        self.engine = Engine(self.session, CONFIG, vocab_size=61, eos_token_ids=())
        self.events: list[TokenEvent] = []

    def add(self, name: str, prompt: Iterable[int], max_tokens: int = 12, n: int = 1) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
        self.engine.add(Request(name, tuple(prompt), params))

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        self.events += events
        return events

    def finish(self) -> None:
        while self.engine.has_unfinished:
            self.step()

    def tokens(self, name: str) -> list[int | None]:
        return [e.token_id for e in self.events if e.request_id == name]

    def alone(self, prompt: Iterable[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.session.reference(ids).argmax()))
        return ids[-count:]


def ends(events: Iterable[TokenEvent]) -> list[tuple[str, str | None, str | None]]:
    return [(e.request_id, e.finish_reason, e.error) for e in events if e.finish_reason]


def test_a_failing_prefill_ends_its_own_requests_only() -> None:
    serving = Serving()
    serving.add("a", [1, 2, 3])
    serving.step()
    serving.add("b", range(8))
    serving.add("c", range(9))
    serving.session.hook = failing("run", ValueError("bad\n  shape"), "prefill")
    events = serving.step()
    assert ends(events) == [(name, "error", "ValueError: bad shape") for name in "bc"]
    assert serving.engine.stats().slots_used == 1
    serving.session.hook = failing("nothing", ValueError())
    serving.finish()
    assert serving.tokens("a") == serving.alone([1, 2, 3], 12)


def test_a_failing_decode_ends_its_own_requests_only() -> None:
    serving = Serving()
    serving.add("a", [1, 2, 3])
    serving.add("b", [4, 5, 6])
    serving.step()
    serving.add("c", [7, 8, 9])
    serving.session.hook = failing("run", StepError("the device is lost"), "decode")
    assert ends(serving.step()) == [(name, "error", "the device is lost") for name in "ab"]
    serving.session.hook = failing("nothing", ValueError())
    serving.finish()
    assert serving.tokens("c") == serving.alone([7, 8, 9], 12)


def test_no_block_of_a_failed_sequence_is_kept() -> None:
    serving = Serving()
    serving.session.fail_next(1)
    serving.add("a", range(9))
    assert ends(serving.step()) == [("a", "error", "RuntimeError: injected fault")]
    serving.add("a", range(9))
    for _ in range(4):
        serving.step()
    assert serving.events[1].cached_tokens == 0
    # 12 tokens are computed now; the third block of 4 would be kept at the end
    kept = serving.engine.stats().prefix_store_bytes
    assert kept == 8 * serving.session.info.kv_bytes_per_token
    serving.session.fail_next(1)
    assert ends(serving.step())
    assert serving.engine.stats().prefix_store_bytes == kept


def test_bad_logits_end_their_own_row_only() -> None:
    serving = Serving()
    serving.add("a", [1, 2, 3])
    serving.add("b", [4, 5, 6])
    serving.step()
    serving.session.spoil = 0
    (end,) = ends(serving.step())
    assert end[:2] == ("a", "error")
    assert end[2] is not None
    assert "NaN" in end[2]
    serving.session.spoil = None
    serving.finish()
    assert serving.tokens("b") == serving.alone([4, 5, 6], 12)


def test_memory_that_cannot_be_moved_ends_all_that_run_and_none_that_wait() -> None:
    serving = Serving()
    for name, max_tokens in (("a", 2), ("b", 9), ("c", 9), ("d", 9), ("e", 9)):
        serving.add(name, [1, ord(name) - 90], max_tokens)
    serving.session.hook = failing("move", MemoryError())
    serving.step()
    events = serving.step()
    # a has its tokens; its leaving would have moved d into its slot
    assert ends(events)[0] == ("a", "length", None)
    assert ends(events)[1:] == [(name, "error", "MemoryError") for name in "bcd"]
    stats = serving.engine.stats()
    assert (stats.slots_used, stats.waiting) == (0, 1)
    assert serving.session.released == [0, 1, 2, 3]
    serving.finish()
    assert serving.tokens("e") == serving.alone([1, ord("e") - 90], 9)


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_others_that_fail_between_steps_are_told_in_the_next(end: str) -> None:
    serving = Serving()
    serving.add("a", [1, 2, 3], n=1)
    serving.add("b", [1, 2, 4], max_tokens=2)
    serving.step()
    serving.session.hook = failing("move", RuntimeError("torn"))
    if end == "abort":
        assert ends(serving.engine.abort("a")) == [("a", "abort", None)]
    else:
        serving.engine.stop("a", 0, "text")
    assert serving.engine.has_unfinished
    assert ends(serving.step()) == [("b", "error", "RuntimeError: torn")]
    assert not serving.engine.has_unfinished


def test_a_prefix_that_cannot_be_loaded_ends_what_runs_and_the_engine_goes_on() -> None:
    serving = Serving()
    serving.add("a", range(9), max_tokens=1)
    serving.finish()
    serving.session.hook = failing("write", RuntimeError("no room"))
    serving.add("b", range(9))
    assert ends(serving.step()) == [("b", "error", "RuntimeError: no room")]
    serving.session.hook = failing("nothing", RuntimeError())
    serving.add("c", range(9))
    serving.finish()
    assert serving.tokens("c") == serving.alone(range(9), 12)


@pytest.mark.parametrize("where", ["run", "move", "read", "write"])
def test_an_interrupt_passes_through_and_leaves_an_engine_that_works(where: str) -> None:
    serving = Serving()
    serving.add("warm", range(9), max_tokens=3)
    serving.finish()
    serving.session.hook = failing(where, KeyboardInterrupt())
    serving.add("a", range(9), max_tokens=2)
    serving.add("b", range(30, 39), max_tokens=9)
    with pytest.raises(KeyboardInterrupt):
        serving.finish()
    serving.session.hook = failing("nothing", KeyboardInterrupt())
    serving.add("c", range(9))
    serving.finish()
    lost = "the step was interrupted: KeyboardInterrupt"
    assert {e for _, reason, e in ends(serving.events) if reason == "error"} == {lost}
    assert all(len([x for x in ends(serving.events) if x[0] == name]) == 1 for name in "abc")
    assert serving.tokens("c") == serving.alone(range(9), 12)
    assert serving.engine.stats().running == 0


def test_books_that_are_wrong_raise_when_they_are_checked() -> None:
    serving = Serving()
    serving.add("a", [1, 2])
    serving.step()
    serving.engine._scheduler.running.clear()
    with pytest.raises(RuntimeError, match="books are wrong: a/0 owns a slot and is not running"):
        serving.step()
