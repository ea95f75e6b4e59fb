"""A prefill run that is interrupted while ONNX Runtime computes it, on an exported model."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.onnxruntime import open_session
from trtllm_lite.runtime.backends.ort_session import OrtSession
from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import RunInterruptedError

SLOT = 1


@pytest.fixture
def session(tiny_bundle: Path) -> Iterator[OrtSession]:
    opened = open_session(open_bundle(tiny_bundle), SessionOptions(2, 64, intra_op_num_threads=1))
    yield opened
    opened.close()


def prefill(session: OrtSession, past: int, tokens: list[int]) -> npt.NDArray[np.float32]:
    """The logits of the last token."""
    count = len(tokens)
    past_len, length, total = (np.array([n], np.int32) for n in (past, count, past + count))
    ids, wanted = np.array([tokens], np.int64), np.array([[count - 1]], np.int64)
    batch = Batch("prefill", SLOT, ids, past_len, length, total, wanted)
    logits: npt.NDArray[np.float32] = session.run(batch)[0, 0].copy()
    return logits


def prefill_until_interrupted(session: OrtSession) -> None:
    for _ in range(10_000):
        prefill(session, 3, list(range(20, 50)))


def test_the_slot_holds_what_it_held_and_the_session_goes_on(session: OrtSession) -> None:
    prefill(session, 0, [5, 6, 7])
    expected = prefill(session, 3, [8, 9])
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.is_set():
            session.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(RunInterruptedError):
            prefill_until_interrupted(session)
    finally:
        ended.set()
        thread.join()
    np.testing.assert_array_equal(prefill(session, 3, [8, 9]), expected)


def test_a_run_after_the_interrupt_is_not_concerned(session: OrtSession) -> None:
    expected = prefill(session, 0, [5, 6, 7])
    session.interrupt()
    np.testing.assert_array_equal(prefill(session, 0, [5, 6, 7]), expected)
