"""The TensorRT session against a float64 numpy model, on a fake TensorRT that refuses what the real
one refuses and a fake device that does queued work only when somebody waits."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trtllm_lite.runtime.backends.device import DeviceError
from trtllm_lite.runtime.backends.fake_tensorrt import FakeContext
from trtllm_lite.runtime.errors import EngineDeadError, RunInterruptedError, StepError, UsageError

Make = Callable[..., Any]


def test_ragged_prompts_then_many_steps_are_those_of_the_model(rig: Any) -> None:
    driver = rig.driver()
    driver.run("prefill", 0, [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]])
    for step in range(12):
        driver.run("decode", 0, [[(step * 7 + i) % 29] for i in range(3)])
    assert rig.count(driver.session) == [1, 12, 0]


def test_each_run_takes_the_plan_that_its_rows_need(rig: Any) -> None:
    driver = rig.driver()
    driver.run("prefill", 2, [[1, 2, 3], [4, 5]])
    assert rig.count(driver.session) == [1, 0, 0]
    driver.run("prefill", 2, [[1, 2], [1]])  # the next chunks
    assert rig.count(driver.session) == [1, 0, 1]
    driver.run("prefill", 1, [[7, 8], [9, 9]])  # a new one beside one that goes on
    assert rig.count(driver.session) == [1, 0, 2]
    driver.run("prefill", 3, [[9]])
    assert rig.count(driver.session) == [1, 1, 2]
    driver.run("decode", 1, [[1], [2]])
    assert rig.count(driver.session) == [1, 2, 2]
    driver.run("decode", 1, [[1, 2, 3], [4, 5]], every=True)  # drafts
    assert rig.count(driver.session) == [1, 2, 3]
    assert driver.session.info.multi_token_decode


def test_slots_are_moved_swapped_copied_out_and_put_back_on_the_device(rig: Any) -> None:
    driver = rig.driver()
    driver.run("prefill", 0, [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]])
    driver.swap(0, 1)
    driver.move(2, 3)
    driver.run("decode", 0, [[11], [12]])
    driver.run("prefill", 3, [[13, 14]])
    spans = [(0, 2), (2, 6), (6, 6), (1, 3)]
    blocks = driver.session.read(0, spans)
    assert [b.num_tokens for b in blocks] == [2, 4, 0, 2]
    assert blocks[0].keys[0].base is None
    driver.session.write(2, 0, blocks[:2])
    driver.slots[2] = driver.slots[0][:6]
    driver.session.write(3, 0, [])
    driver.run("prefill", 2, [[15, 16, 17]])
    for part in ("keys", "values"):
        for layer in range(2):
            first, second, _, overlap = (getattr(b, part)[layer] for b in blocks)
            assert first.shape == (2, 2, 16)
            assert np.array_equal(overlap, np.concatenate([first[:, 1:], second[:, :1]], axis=1))


def test_the_cache_is_one_allocation_that_no_run_copies(rig: Any) -> None:
    before = len(rig.device.addresses)
    session = rig.session()
    opened = rig.device.addresses
    # The pool, room for swaps, the memory of the contexts, inputs and logits on both sides.
    assert len(opened) - before == 7
    assert session.pool.nbytes == 2 * 2 * 4 * 2 * 56 * 16 * 4
    held = session.pool.keys(0)[0]
    session.run(rig.batch("prefill", 0, [(0, [1, 2, 3])]))
    session.run(rig.batch("decode", 0, [(3, [1])]))
    assert session.pool.keys(0)[0] == held
    assert rig.device.addresses == opened


def test_decode_runs_are_recorded_once_and_replayed(rig: Any) -> None:
    driver = rig.driver()
    driver.run("prefill", 0, [[1, 2, 3], [4, 5]])
    for step in range(5):
        driver.run("decode", 0, [[step], [step + 1]])
    (two,) = rig.device.recorded
    assert two.launches == 4
    for step in range(3):
        driver.run("decode", 0, [[step]])
    assert [x.launches for x in rig.device.recorded] == [4, 2]
    driver.run("decode", 0, [[7], [8]])
    assert [x.launches for x in rig.device.recorded] == [5, 2]
    driver.run("decode", 1, [[9]])  # not from slot 0 on: as it is
    assert [x.launches for x in rig.device.recorded] == [5, 2]


def test_recorded_runs_are_forgotten_when_memory_moves(rig: Any) -> None:
    driver = rig.driver(num_slots=2)
    driver.run("prefill", 0, [[1, 2, 3], [4, 5]])
    for step in range(3):
        driver.run("decode", 0, [[step], [step]])
    old = rig.device.recorded[0]
    assert old.launches == 2
    driver.run("prefill", 0, [[1] * 9, [2] * 9], every=True)  # more logits than ever before
    driver.run("decode", 0, [[3], [3]])
    driver.run("decode", 0, [[3], [3]])
    assert [x.launches for x in rig.device.recorded] == [2, 1]
    with pytest.raises(DeviceError, match="closed"):
        old.launch()


def test_a_large_decode_batch_is_filled_up_with_rows_of_free_slots(make: Make) -> None:
    rig = make(rows=(1, 20), max_num_seqs=20)
    driver = rig.driver(num_slots=20)
    driver.run("prefill", 0, [[1 + i % 5] * 3 for i in range(11)])

    def rows() -> int:
        return int(rig.executions(driver.session, "decode")[-1]["input_ids"][0])

    driver.run("decode", 0, [[i] for i in range(11)])
    assert rows() == 16
    driver.run("decode", 0, [[i] for i in range(11)])
    assert (rows(), rig.device.recorded[-1].launches) == (16, 1)
    driver.run("prefill", 13, [[9, 8, 7, 6]])  # a prompt in a slot that would be written
    for _ in range(2):
        driver.run("decode", 0, [[i] for i in range(11)])
    # Every number of rows comes by in this way: only the usual ones are worth a recording.
    assert (rows(), len(rig.device.recorded)) == (11, 1)
    driver.run("decode", 13, [[5]])
    driver.release(13)
    driver.run("decode", 0, [[i] for i in range(11)])
    assert (rows(), rig.device.recorded[0].launches) == (16, 2)


def test_a_batch_beyond_the_profiles_is_run_in_pieces(make: Make) -> None:
    rig = make(rows=(1, 2), seq=(1, 5), num_logits=(1, 3))
    driver = rig.driver()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2], [3, 4, 5, 6, 7, 8], [9]]
    driver.run("prefill", 0, prompts)
    assert max(x["input_ids"][0] for x in rig.executions(driver.session, "extend")) == 1
    driver.run("decode", 0, [[i] for i in range(4)])
    driver.run("prefill", 1, [[3, 4, 5, 6, 7, 8, 9, 1, 2]], every=True)
    driver.run("decode", 0, [[7, 8, 9, 10, 11], [1, 2, 3]], every=True)


def test_logits_that_are_wanted_more_than_once_are_computed_once(make: Make) -> None:
    """Four positions a row, which are two, where the plan gives three at most."""
    rig = make(num_logits=(1, 3))
    session = rig.session()
    batch = rig.batch("prefill", 0, [(0, [3, 1, 4])])
    batch = replace(batch, logits_indices=np.array([[2, 0, 2, 2]]))
    logits = session.run(batch)
    expected = rig.model.reference([3, 1, 4])[[2, 0, 2, 2]]
    assert logits[0] == pytest.approx(expected, abs=1e-5)
    assert rig.count(session) == [1, 0, 0]


def test_short_runs_are_filled_up_to_the_profile(make: Make) -> None:
    rig = make(seq=(4, 24), num_logits=(2, 24))
    driver = rig.driver()
    driver.run("prefill", 0, [[1, 2], [3]])
    driver.run("prefill", 0, [[4, 5], [6, 7, 8]])
    shapes = rig.executions(driver.session, "extend")[-1]
    assert (shapes["input_ids"], shapes["logits_indices"]) == ((2, 4), (2, 2))
    full = rig.batch("prefill", 2, [(53, [1, 2, 3])])
    with pytest.raises(StepError, match=r"53 cached and 4 new tokens.*does not fit the 56"):
        driver.session.run(full)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_slots_every_logit_is_the_models(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    sizes = {} if seed % 2 else {"rows": (1, 3), "seq": (1, 4), "num_logits": (1, 2)}
    rig = make(**sizes)
    driver = rig.driver()
    for _ in range(25):
        first = rng.randrange(4)
        rows = range(first, rng.randint(first, 3) + 1)
        full = any(len(driver.slots.get(slot, ())) > 40 for slot in rows)
        match rng.randrange(7):
            case 0 | 1 if not full:
                news = [[rng.randrange(29) for _ in range(rng.randint(1, 9))] for _ in rows]
                driver.run("prefill", first, news, every=rng.random() < 0.3)
            case 2 | 3 if not full and all(driver.slots.get(slot) for slot in rows):
                driver.run("decode", first, [[rng.randrange(29)] for _ in rows])
            case 4 if first in driver.slots:
                driver.move(first, (first + 1) % 4)
            case 5 if {first, (first + 2) % 4} <= driver.slots.keys():
                driver.swap(first, (first + 2) % 4)
            case _:
                driver.release(first)


def test_nothing_is_written_beyond_a_slot(rig: Any) -> None:
    session = rig.session()
    with pytest.raises(StepError, match="past_lens"):
        session.run(rig.batch("decode", 0, [(56, [1])]))
    with pytest.raises(StepError, match="past_lens"):
        session.run(rig.batch("prefill", 0, [(50, [1] * 7)]))
    assert rig.count(session) == [0, 0, 0]
    session.run(rig.batch("decode", 3, [(55, [1])]))


def test_a_step_that_fails_says_why_and_the_next_one_runs(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = rig.driver()
    driver.run("prefill", 0, [[1, 2, 3], [4]])
    with monkeypatch.context() as patch:
        patch.setattr(FakeContext, "execute_async_v3", lambda self, stream: False)
        with pytest.raises(StepError, match="tensorrt, decode: the execution was refused"):
            driver.session.run(rig.batch("decode", 0, [(3, [1]), (1, [1])]))
    with monkeypatch.context() as patch:
        patch.setattr(FakeContext, "set_input_shape", lambda self, name, shape: False)
        with pytest.raises(StepError, match="the shape of input_ids was refused"):
            driver.session.run(rig.batch("decode", 1, [(1, [1])]))
    driver.run("decode", 0, [[5], [6]])
    driver.run("decode", 1, [[7]])


def test_nothing_stays_queued_behind_a_run_that_failed(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = rig.session()
    copy, copies = rig.device.copy, []

    def failing(*arguments: int) -> None:
        copies.append(arguments)
        if len(copies) == 2:  # the logits
            raise DeviceError("the copy cannot be queued")
        copy(*arguments)

    monkeypatch.setattr(rig.device, "copy", failing)
    with pytest.raises(StepError, match="tensorrt, prefill: the copy cannot be queued"):
        session.run(rig.batch("prefill", 0, [(0, [1, 2])]))
    assert rig.count(session) == [1, 0, 0]


def test_without_cuda_graphs_decoding_goes_on(
    rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(work: object) -> None:
        raise DeviceError("cannot be captured")

    monkeypatch.setattr(rig.device, "record", refuse)
    driver = rig.driver()
    driver.run("prefill", 0, [[1, 2, 3]])
    for step in range(3):
        driver.run("decode", 0, [[step]])
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "decode runs without CUDA graphs: cannot be captured"
    ]


def test_a_prompt_that_nobody_waits_for_is_given_up_between_its_pieces(make: Make) -> None:
    rig = make(seq=(1, 4))
    driver = rig.driver()
    session = driver.session
    session.interrupt()  # nothing is going on
    driver.run("prefill", 0, [[1, 2, 3, 4, 5, 6]])
    context = rig.context_of(session, "prefill")
    compute = context._compute

    def interrupting(*arguments: Any) -> None:
        compute(*arguments)
        session.interrupt()

    context._compute = interrupting
    with pytest.raises(RunInterruptedError):
        session.run(rig.batch("prefill", 1, [(0, [1, 2, 3, 4, 5, 6])]))
    context._compute = compute
    driver.run("prefill", 1, [[1, 2, 3, 4, 5, 6]])


def test_a_batch_outside_of_the_contract_is_refused(rig: Any) -> None:
    session = rig.session()
    batch = rig.batch("prefill", 0, [(0, [1, 2])])
    with pytest.raises(StepError, match="token_ids"):
        session.run(replace(batch, token_ids=batch.token_ids + 29))
    with pytest.raises(StepError, match="first_slot"):
        session.run(replace(batch, first_slot=4))


def test_places_outside_of_the_pool_are_refused(rig: Any) -> None:
    session = rig.session()
    calls: list[Callable[[], object]] = [
        lambda: session.move(0, 4, 1),
        lambda: session.swap(-1, 0, 1),
        lambda: session.read(0, [(0, 57)]),
        lambda: session.write(0, 55, session.read(1, [(0, 2)])),
    ]
    for call in calls:
        with pytest.raises(IndexError, match="the pool has 4 slots of 56 tokens"):
            call()


def test_closing_gives_everything_back(rig: Any) -> None:
    driver = rig.driver()
    driver.run("prefill", 0, [[1, 2, 3], [1]])
    driver.swap(0, 1)
    driver.session.read(0, [(0, 1)])
    driver.run("decode", 0, [[1]])
    driver.session.close()
    driver.session.close()
    assert rig.device.addresses == ()
    with pytest.raises(EngineDeadError, match="closed"):
        driver.session.run(rig.batch("decode", 0, [(1, [1])]))
    with pytest.raises(EngineDeadError):
        driver.session.move(0, 1, 1)


LOST = "fake is lost to this process, which has to be started again: an illegal address was read"


def losing(device: Any) -> None:
    """The next queued work does what breaks a context."""

    def work() -> None:
        raise DeviceError("an illegal address was read")

    device.queue(work)


@pytest.mark.parametrize("when", ["run", "recorded run", "read"])
def test_a_device_that_is_lost_is_the_end_of_the_session(rig: Any, when: str) -> None:
    """Whatever finds out, everything that comes later says the same, and nothing is given back."""
    driver = rig.driver()
    session = driver.session
    driver.run("prefill", 0, [[1, 2, 3]])
    if when == "recorded run":
        driver.run("decode", 0, [[1]])
        driver.run("decode", 0, [[2]])
    held = set(rig.device.addresses)
    losing(rig.device)
    calls: list[Callable[[], object]] = [
        lambda: session.run(rig.batch("decode", 0, [(5, [1])])),
        lambda: session.read(0, [(0, 2)]),
        lambda: session.move(0, 1, 2),
        lambda: session.release(0),
    ]
    first = calls[1] if when == "read" else calls[0]
    for call in (first, *calls):
        with pytest.raises(EngineDeadError) as caught:
            call()
        assert str(caught.value) == LOST
    session.close()
    session.close()
    assert held <= set(rig.device.addresses)
    with pytest.raises(EngineDeadError, match="closed"):
        session.release(0)


def test_a_wait_that_fails_after_a_run_that_failed_is_the_end(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the code: nobody knows what is still queued."""

    def broken() -> None:
        raise DeviceError("unknown error")

    driver = rig.driver()
    driver.run("prefill", 0, [[1, 2, 3]])
    monkeypatch.setattr(rig.device, "synchronize", broken)
    with pytest.raises(EngineDeadError, match="unknown error"):
        driver.session.run(rig.batch("decode", 0, [(3, [1])]))


def test_memory_that_cannot_be_had_ends_one_step(make: Make) -> None:
    """More logits than ever before, on a device that is full."""
    rig = make(num_logits=(1, 24))
    driver = rig.driver()
    driver.run("prefill", 0, [[1, 2, 3]])
    free = rig.device.memory()[0]
    rig.device.allocate(free)
    with pytest.raises(StepError, match=r"bytes asked for, .* are free"):
        driver.run("prefill", 1, [[4] * 20], every=True)


def test_a_pool_that_does_not_fit_is_refused_with_numbers(make: Make) -> None:
    rig = make(device_bytes=100_000)
    says = r"4 slots x 56 tokens needs 0.0 GiB; fake has 0.0 of 0.0 GiB free; .* or build plans"
    with pytest.raises(UsageError, match=says):
        rig.session()
    assert rig.device.addresses == ()
