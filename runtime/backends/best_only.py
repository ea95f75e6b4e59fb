"""Rows of logits of which only the largest are known, made of what a graph gives of them.

A row is [vocab] float32 with -inf in place of what is not known. That is what a sampler needs that
takes the best token, or draws among fewer than are known.

Between equal logits a sampler takes the lower token. The kernels of ONNX Runtime's CUDA provider do
not: which of those that equal the last known one are known is chance, and where there is a NaN,
nothing is said. So what is known decides only down to where the last known one is still smaller.
Source: ONNX Runtime, `core/providers/cuda/math/topk_impl.cuh`, RadixTopK.
"""

import numpy as np
import numpy.typing as npt

from trtllm_lite.runtime.backends.device import ALIGNMENT

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class BestOnly:
    """`count` of `vocab_size` logits a row: `top_logits` float32, and behind them, in the same
    memory, `top_ids` int64."""

    def __init__(self, vocab_size: int, count: int) -> None:
        self.count = count
        self._vocab_size = vocab_size
        self._rows = np.empty((0, vocab_size), np.float32)
        self._known: I64 = np.empty((0, count), np.int64)
        """What is not -inf in the first rows."""

    def is_enough(self, candidates: int) -> bool:
        """Whether so many of the largest logits may be decided by what is known, which `decides`
        tells of what was computed. 0 stands for all logits."""
        return 0 < candidates < self.count

    def decides(self, memory: npt.NDArray[np.uint8], rows: int, candidates: int, of: int) -> bool:
        """Whether the `candidates` largest logits of each of the first `rows` rows are known, of
        `of` rows that lie in the memory."""
        values, _ = self.places(of)
        best = memory[values : values + rows * self.count * 4].view(np.float32)
        best = best.reshape(rows, self.count)
        larger = (best > best.min(axis=1, keepdims=True)).sum(axis=1)
        return bool((larger >= candidates).all())

    def places(self, rows: int) -> tuple[int, int]:
        """Where the two begin, in bytes."""
        values = rows * self.count * 4
        return 0, -(-values // ALIGNMENT) * ALIGNMENT

    def nbytes(self, rows: int) -> int:
        """Of the two for so many rows."""
        return self.places(rows)[1] + rows * self.count * 8

    def logits(self, memory: npt.NDArray[np.uint8], rows: int, wanted: int) -> F32:
        """[rows, wanted, vocab], a view of a buffer that the next call overwrites.

        Only what the last call has put into the buffer is taken out of it again: a whole row is
        many times as large. Raises IndexError for a token outside of the vocabulary.
        """
        count, size = rows * wanted, self.count
        values, ids = self.places(count)
        best = memory[values : values + count * size * 4].view(np.float32).reshape(count, size)
        tokens = memory[ids : ids + count * size * 8].view(np.int64).reshape(count, size)
        np.put_along_axis(self._rows[: len(self._known)], self._known, -np.inf, axis=1)
        if len(self._rows) < count:
            self._rows = np.full((count, self._vocab_size), -np.inf, np.float32)
        np.put_along_axis(self._rows[:count], tokens, best, axis=1)
        self._known = tokens.copy()
        return self._rows[:count].reshape(rows, wanted, self._vocab_size)
