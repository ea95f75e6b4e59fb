"""A batch as the runs that a graph of target "cuda" can do.

Its attention knows no padding behind tokens that continue from a cache (`runtime/manifest.py`, the
contract of that target), so such rows run one by one, each without padding. Rows that all begin run
together, and so does one token a row.
"""

from collections.abc import Iterator

from trtllm_lite.runtime.backends.base import Batch
from trtllm_lite.runtime.backends.batch_pieces import Piece, some_rows


def runs(batch: Batch) -> Iterator[Piece]:
    """In the order of the rows."""
    if batch.phase == "decode" or not batch.past_lens.any():
        yield Piece(batch, 0)
        return
    for row in range(batch.rows):
        yield Piece(some_rows(batch, row, row + 1), row)


def max_total_len(run: Batch, longest: int) -> int:
    """What the run's input of that name has to be. longest: of any sequence.

    A decode run gets `longest` whatever its rows hold, which the attention allows where there is
    one token a row: a value that is read in host memory is part of what a CUDA graph captures.
    """
    if run.phase == "decode":
        return longest
    return int(run.past_lens.max()) + int(run.token_ids.shape[1])
