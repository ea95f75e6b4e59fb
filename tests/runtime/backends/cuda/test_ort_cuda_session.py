"""The session over the CUDA provider: what it binds, what it copies, and what comes out."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.ort_cuda import open_on_host
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.errors import EngineDeadError, RunInterruptedError, StepError

ROWS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
MakeBatch = Callable[..., Batch]


def close_to(wanted: Any) -> Any:
    return pytest.approx(wanted, rel=1e-5, abs=1e-4)


def step(rig: Any, make_batch: MakeBatch, rows: list[list[int]]) -> Any:
    """Decode the last token of each row; the others are in the cache."""
    tokens = [[row[-1]] for row in rows]
    return rig.session.run(make_batch("decode", tokens, [len(row) - 1 for row in rows]))


def test_ragged_prompts_and_decode_equal_runs_without_a_cache(
    make_rig: Any, make_batch: MakeBatch
) -> None:
    rig = make_rig()
    logits = rig.session.run(make_batch("prefill", ROWS, [0, 0, 0]))
    for row, tokens in enumerate(ROWS):
        assert logits[row, 0] == close_to(rig.expected(tokens))
    grown = [list(row) for row in ROWS]
    for token in (7, 1, 20, 33):
        grown = [[*tokens, token] for tokens in grown]
        logits = step(rig, make_batch, grown)
        for row, tokens in enumerate(grown):
            assert logits[row, 0] == close_to(rig.expected(tokens))


@pytest.mark.parametrize(("capacity", "longest"), [(96, 96), (200, 96), (40, 40)])
def test_a_decode_run_s_longest_length_fits_the_tables_and_the_slot(
    make_rig: Any, make_batch: MakeBatch, capacity: int, longest: int
) -> None:
    """The attention refuses a longer one; a captured graph keeps the one that it had."""
    rig = make_rig(capacity=capacity)
    rig.session.run(make_batch("prefill", [[3, 1]], [0]))
    for tokens in ([3, 1, 4], [3, 1, 4, 1]):
        step(rig, make_batch, [tokens])
    (captured,) = rig.inference.captured.values()
    assert np.frombuffer(captured.host["max_total_len"], np.int32).tolist() == [longest]


def test_rows_that_continue_run_one_by_one_without_padding(
    make_rig: Any, make_batch: MakeBatch
) -> None:
    rig = make_rig()
    heads = [row[:2] for row in ROWS]
    rig.session.run(make_batch("prefill", heads, [0, 0, 0]))
    rest = [ROWS[0][2:], [30], ROWS[2][2:]]
    logits = rig.session.run(make_batch("prefill", rest, [2, 2, 2]))
    for row, (head, tail) in enumerate(zip(heads, rest, strict=True)):
        assert logits[row, 0] == close_to(rig.expected(head + tail))


def test_a_decode_run_copies_its_inputs_and_its_logits_and_nothing_of_the_cache(
    make_rig: Any, make_batch: MakeBatch
) -> None:
    rig = make_rig()
    rig.session.run(make_batch("prefill", ROWS, [0, 0, 0]))
    before = rig.device.copied
    step(rig, make_batch, [[*row, 7] for row in ROWS])
    logits = 3 * 40 * 4
    small_inputs = 4 * 256
    assert rig.device.copied - before == logits + small_inputs
    assert small_inputs + logits < rig.session.pool.nbytes / 10


def test_only_the_largest_logits_are_copied_where_no_others_matter(
    make_rig: Any, make_batch: MakeBatch
) -> None:
    rig = make_rig()
    assert rig.session.info.top_logits == 4
    whole = rig.session.run(make_batch("prefill", ROWS, [0, 0, 0])).copy()
    for candidates, known in ((1, 4), (3, 4), (4, 40), (5, 40), (0, 40)):
        before = rig.device.copied
        batch = replace(make_batch("prefill", ROWS, [0, 0, 0]), candidates=candidates)
        logits = rig.session.run(batch)
        assert (np.isfinite(logits).sum(axis=-1) == known).all()
        best = np.argsort(-whole, axis=-1)[..., :known]
        got, want = (np.take_along_axis(x, best, axis=-1) for x in (logits, whole))
        assert got == close_to(want)
        copied = rig.device.copied - before - 4 * 256
        assert copied == (3 * 40 * 4 if known == 40 else 256 + 3 * 4 * 8)


def test_which_of_equal_logits_is_the_best_does_not_depend_on_what_the_graph_lists(
    make_rig: Any, make_batch: MakeBatch
) -> None:
    """Ten tokens share the largest logit; the graph may list any four of them."""
    rig = make_rig()
    real = rig.inference._real

    def run(names: list[str], feeds: dict[str, Any]) -> list[Any]:
        made = dict(zip(names, real.run(names, feeds), strict=True))
        made["logits"][:, :, 10:20] = 100.0
        made["top_logits"][:] = 100.0
        made["top_ids"][:] = [19, 16, 18, 17]
        return list(made.values())

    rig.inference._real = SimpleNamespace(run=run)
    for candidates in (1, 0):
        batch = replace(make_batch("prefill", ROWS, [0, 0, 0]), candidates=candidates)
        assert rig.session.run(batch).argmax(axis=-1).tolist() == [[10]] * 3


def test_the_cache_is_bound_in_place_and_by_slot(make_rig: Any, make_batch: MakeBatch) -> None:
    rig = make_rig()
    bound: list[Any] = []
    kept = rig.inference.run_with_iobinding

    def spy(binding: Any, options: Any) -> None:
        bound.append(binding)
        kept(binding, options)

    rig.inference.run_with_iobinding = spy
    rig.session.run(make_batch("prefill", [[1, 2]], [0], 5))
    (binding,) = bound
    pool = rig.session.pool
    for part, addresses in (("key", pool.keys(5)), ("value", pool.values(5))):
        past, present = binding.inputs[f"past_{part}_0"], binding.outputs[f"present_{part}_0"]
        assert past == present
        assert [past.address] == addresses
        assert past.shape == (1, 1, rig.session.pool.capacity, 16)
    assert {n for n, place in binding.inputs.items() if place.device == "cpu"} == {"max_total_len"}
    assert {place.device for place in binding.outputs.values()} == {"cuda"}


def test_decode_runs_are_captured_by_their_rows_and_replayed(
    make_rig: Any, make_batch: MakeBatch
) -> None:
    rig = make_rig()
    rig.session.run(make_batch("prefill", ROWS, [0, 0, 0]))
    assert rig.inference.captured == {}
    grown = [list(row) for row in ROWS]
    for token in range(5):
        grown = [[*row, token] for row in grown]
        logits = step(rig, make_batch, grown).copy()
        # Another number of rows in between is another graph.
        alone = step(rig, make_batch, grown[:1])
        assert alone[0, 0] == close_to(logits[0, 0])
    assert len(rig.inference.captured) == 2
    assert rig.inference.replays == 2 * 4
    for row, tokens in enumerate(grown):
        assert logits[row, 0] == close_to(rig.expected(tokens))


def test_a_graph_whose_capture_failed_is_never_launched(
    make_rig: Any, make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ONNX Runtime would launch the part of it that it has, and say nothing."""
    rig = make_rig()
    rig.session.run(make_batch("prefill", ROWS, [0, 0, 0]))
    step(rig, make_batch, [[*ROWS[0], 7]])

    def fail() -> None:
        raise RuntimeError("no memory while a stream is captured")

    rig.inference.while_capturing = fail
    grown = [list(row) for row in ROWS]
    for token in (7, 8, 9):
        grown = [[*row, token] for row in grown]
        logits = step(rig, make_batch, grown)
        for row, tokens in enumerate(grown):
            assert logits[row, 0] == close_to(rig.expected(tokens))
    assert [r.getMessage() for r in caplog.records] == [
        "decode runs without CUDA graphs: no memory while a stream is captured"
    ]
    replays = rig.inference.replays
    step(rig, make_batch, [[*grown[0], 1]])  # what was whole before is launched as ever
    assert rig.inference.replays == replays + 1


def test_a_run_that_fails_without_its_capture_too_is_an_error(
    make_rig: Any, make_batch: MakeBatch
) -> None:
    rig = make_rig()
    rig.session.run(make_batch("prefill", ROWS, [0, 0, 0]))

    def fail(options: Any) -> None:
        raise RuntimeError("the tables are too short")

    rig.inference.before_run = fail
    with pytest.raises(StepError, match="the tables are too short"):
        step(rig, make_batch, [[*ROWS[0], 7]])


def test_more_rows_are_filled_up_with_empty_slots_only(
    make_rig: Any, make_batch: MakeBatch
) -> None:
    """Nine rows run as twelve, unless another sequence holds one of the slots behind them."""
    rig = make_rig(num_slots=12)
    rows = [[i, i + 1] for i in range(9)]
    rig.session.run(make_batch("prefill", [row[:1] for row in rows], [0] * 9))
    logits = step(rig, make_batch, rows)
    assert logits.shape[0] == 9
    for row, tokens in enumerate(rows):
        assert logits[row, 0] == close_to(rig.expected(tokens))
    rig.session.run(make_batch("prefill", [[8, 8, 8]], [0], 10))
    for token in (5, 6, 7):
        rows = [[*row, token] for row in rows]
        step(rig, make_batch, rows)
    # Every number of rows comes by in this way: only the usual ones become CUDA graphs.
    assert len(rig.inference.captured) == 1
    kept = rig.session.run(make_batch("prefill", [[4]], [3], 10))
    assert kept[0, 0] == close_to(rig.expected([8, 8, 8, 4]))


def test_a_larger_logits_buffer_makes_new_graphs(make_rig: Any, make_batch: MakeBatch) -> None:
    rig = make_rig(num_slots=2)
    rows = [[3, 1, 4], [9, 2, 6]]
    rig.session.run(make_batch("prefill", [row[:1] for row in rows], [0, 0]))
    for length in (2, 3):
        step(rig, make_batch, [row[:length] for row in rows])
    assert len(rig.inference.captured) == 1
    every = make_batch("prefill", [[7] * 20], [0], 0)
    every = Batch(**{**every.__dict__, "logits_indices": np.arange(20)[None]})
    rig.session.run(every)
    rig.session.run(make_batch("prefill", rows, [0, 0]))
    for token in (1, 2, 3):
        rows = [[*row, token] for row in rows]
        logits = step(rig, make_batch, rows)
        assert logits[1, 0] == close_to(rig.expected(rows[1]))
    assert len(rig.inference.captured) == 2


def test_slots_can_be_moved_swapped_read_and_written(make_rig: Any, make_batch: MakeBatch) -> None:
    rig = make_rig()
    rig.session.run(make_batch("prefill", ROWS, [0, 0, 0]))
    rig.session.swap(0, 2, 7)
    rig.session.move(1, 3, 2)
    blocks = rig.session.read(2, [(0, 2), (2, 5)])
    rig.session.write(1, 0, blocks)
    rig.session.release(2)
    rows = [[*ROWS[2], 8], [*ROWS[0], 8], [1, 8], [*ROWS[1], 8]]
    past = [7, 5, 0, 2]
    tokens = [[8], [8], [8], [8]]
    logits = rig.session.run(make_batch("decode", tokens, past))
    for row in (0, 1, 3):
        assert logits[row, 0] == close_to(rig.expected(rows[row]))


def test_a_failed_run_ends_alone(make_rig: Any, make_batch: MakeBatch) -> None:
    rig = make_rig()

    def fails(options: Any) -> None:
        raise RuntimeError("out of\nmemory")

    rig.inference.before_run = fails
    with pytest.raises(StepError, match="onnxruntime, prefill: out of memory"):
        rig.session.run(make_batch("prefill", [[1, 2]], [0]))
    rig.inference.before_run = lambda options: None
    logits = rig.session.run(make_batch("prefill", [[1, 2]], [0]))
    assert logits[0, 0] == close_to(rig.expected([1, 2]))


FAILURE = "CUDA failure {}: something ; GPU=0 ; hostname=h ; file=f ; line=1 ; expr=e"


def test_an_error_that_breaks_the_context_is_the_end(make_rig: Any, make_batch: MakeBatch) -> None:
    """As ONNX Runtime words it. Its session is never let go: its destructor would abort."""
    rig = make_rig()

    def fails(options: Any) -> None:
        raise RuntimeError(FAILURE.format(2))

    rig.inference.before_run = fails
    with pytest.raises(StepError, match="CUDA failure 2"):
        rig.session.run(make_batch("prefill", [[1, 2]], [0]))

    def breaks(options: Any) -> None:
        raise RuntimeError(FAILURE.format(700))

    rig.inference.before_run = breaks
    says = "fake is lost to this process, which has to be started again: CUDA failure 700"
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=says):
            rig.session.run(make_batch("prefill", [[1, 2]], [0]))
    rig.inference.before_run = lambda options: None
    with pytest.raises(EngineDeadError, match=says):
        rig.session.run(make_batch("prefill", [[1, 2]], [0]))
    inference, held = weakref.ref(rig.ort.sessions.pop()), rig.device.addresses
    rig.session.close()
    assert rig.device.addresses == held
    rig.session = None
    gc.collect()
    assert inference() is not None


def test_a_session_that_is_sound_is_let_go(make_rig: Any) -> None:
    rig = make_rig()
    inference = weakref.ref(rig.ort.sessions.pop())
    rig.session.close()
    gc.collect()
    assert inference() is None


def test_an_interrupted_prefill_says_so(make_rig: Any, make_batch: MakeBatch) -> None:
    rig = make_rig()
    rig.session.run(make_batch("prefill", [[1], [2]], [0, 0]))
    rig.inference.before_run = lambda options: rig.session.interrupt()
    with pytest.raises(RunInterruptedError):
        rig.session.run(make_batch("prefill", [[1, 2], [2, 3]], [1, 1]))
    # Decode runs are over before anybody could.
    step(rig, make_batch, [[1, 5]])


def test_a_prefill_is_given_up_between_its_runs(
    make_rig: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that continue run one by one; no run is going on when somebody says so."""
    rig = make_rig()
    rig.session.run(make_batch("prefill", [[1], [2]], [0, 0]))
    wait, ran = rig.device.synchronize, []

    def interrupting() -> None:
        wait()
        ran.append(1)
        rig.session.interrupt()

    monkeypatch.setattr(rig.device, "synchronize", interrupting)
    with pytest.raises(RunInterruptedError):
        rig.session.run(make_batch("prefill", [[1, 2], [2, 3]], [1, 1]))
    # The first row's run, and whatever an interrupted run may have queued.
    assert len(ran) == 2


@pytest.mark.parametrize(("past", "tokens"), [(95, 2), (0, 97)])
def test_nothing_is_written_beyond_a_slot(
    make_rig: Any, make_batch: MakeBatch, past: int, tokens: int
) -> None:
    rig = make_rig()
    with pytest.raises(StepError, match="past_lens"):
        rig.session.run(make_batch("prefill", [[1] * tokens], [past]))


def test_several_tokens_a_row_are_no_decode_run(make_rig: Any, make_batch: MakeBatch) -> None:
    rig = make_rig()
    assert not rig.session.info.multi_token_decode
    with pytest.raises(StepError, match="decode"):
        rig.session.run(make_batch("decode", [[1, 2]], [0]))


def test_a_closed_session_gives_everything_back(make_rig: Any, make_batch: MakeBatch) -> None:
    rig = make_rig()
    rig.session.close()
    rig.session.close()
    assert rig.device.addresses == ()
    with pytest.raises(EngineDeadError):
        rig.session.run(make_batch("prefill", [[1, 2]], [0]))


def test_on_the_host_the_same_session_computes_the_same(
    toy_bundle: Bundle, make_rig: Any, make_batch: MakeBatch
) -> None:
    """ONNX Runtime's own IO bindings, by address."""
    rig = make_rig()
    session = open_on_host(toy_bundle, SessionOptions(4, 96))
    for each in (rig.session, session):
        each.run(make_batch("prefill", [row[:2] for row in ROWS], [0, 0, 0]))
        each.run(make_batch("prefill", [[5, 6], [7], [8, 9, 1]], [2, 2, 2]))
    batch = make_batch("decode", [[1], [2], [3]], [4, 3, 5])
    assert session.run(batch) == close_to(rig.session.run(batch))
    assert session.info.device == "cpu"
    session.close()
