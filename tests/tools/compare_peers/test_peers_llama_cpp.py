"""What is handed to llama.cpp, without it."""

from collections.abc import Iterable

import numpy as np
import pytest

from trtllm_lite.tools.compare_peers.adapters.llama_cpp import LOGICAL, Entry, LlamaCpp


class Recorder(LlamaCpp):
    """Keeps what it would have decoded; its token is always 7."""

    def __init__(self) -> None:
        self.calls: list[list[Entry]] = []

    def _clear(self) -> None:
        self.calls.clear()

    def _decode(self, entries: Iterable[Entry]) -> None:
        self.calls.append(list(entries))

    def _argmax(self, index: int) -> int:
        return 7


@pytest.mark.parametrize("length", [1, LOGICAL - 1, LOGICAL, LOGICAL + 1, 4 * LOGICAL])
def test_a_prompt_is_no_more_than_its_batches_hold(length: int) -> None:
    runtime = Recorder()
    stream = runtime.stream(list(range(length)), 3)
    assert stream.tokens == (7, 7, 7)
    *prompt, second, third = runtime.calls
    assert max(len(call) for call in prompt) <= LOGICAL
    entries = [entry for call in prompt for entry in call]
    assert [token for token, *_ in entries] == list(range(length))
    assert np.array_equal([position for _, position, *_ in entries], np.arange(length))
    assert [wanted for *_, wanted in entries] == [False] * (length - 1) + [True]
    assert (second, third) == ([(7, length, 0, True)], [(7, length + 1, 0, True)])
