"""The texts that ship with the exporter, as windows of token ids.

`quality.txt` is held out: nothing is fitted to it. `calibration.txt` is what quantizers may look
at. Both were written for this project and mix stories, manuals, dialogue, code, numbers and a
little of other languages.
"""

from collections.abc import Callable, Sequence
from importlib import resources
from itertools import takewhile
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Text = Literal["quality", "calibration"]
Encode = Callable[[str], Sequence[int]]
WINDOW = 256
RANDOM_WINDOWS = 8
LONG_WINDOW = 1536
LONG_LAST = 512
"""Of a long window, the positions at its end that are looked at."""


def read_text(name: Text) -> str:
    """One of the shipped texts."""
    file = resources.files("trtllm_lite.exporter") / "data" / f"{name}.txt"
    return file.read_text(encoding="utf-8")


def text_windows(
    name: Text, encode: Encode | None, vocab_size: int, longest: int = WINDOW
) -> Array:
    """Token ids [windows, length] int64, length = min(WINDOW, longest), the rest is left out.

    encode: a tokenizer's; a checkpoint that has none gets random ids below `vocab_size`, the same
    for the same text. What the tokenizer starts every text with starts every window: models that
    were made with it predict little without it. Raises ValueError when `longest` is less than 2:
    nothing would be predicted.
    """
    length = min(WINDOW, longest)
    if length < 2:
        raise ValueError(f"windows of {longest} tokens predict nothing")
    if encode is None:
        rng = np.random.default_rng(list(name.encode()))
        return rng.integers(0, vocab_size, (RANDOM_WINDOWS, length))
    ids = list(encode(read_text(name)))
    start = _common_start(ids, encode(""))[: length - 1]
    width = length - len(start)
    count = (len(ids) - len(start)) // width
    text = np.asarray(ids[len(start) :][: count * width], np.int64).reshape(count, width)
    return np.hstack([np.tile(np.asarray(start, np.int64), (count, 1)), text])


def long_window(encode: Encode | None, vocab_size: int, longest: int) -> Array | None:
    """Token ids [length] int64 of the beginning of the quality text, or as many random ones, length
    = min(LONG_WINDOW, longest); None where less than LONG_LAST would lie before the last."""
    if encode is None:
        rng = np.random.default_rng(list(b"long"))
        ids = rng.integers(0, vocab_size, LONG_WINDOW)
    else:
        ids = np.asarray(list(encode(read_text("quality"))), np.int64)
    ids = ids[: min(LONG_WINDOW, longest)]
    return ids if len(ids) > 2 * LONG_LAST else None


def _common_start(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]
