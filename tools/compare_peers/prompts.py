"""Token ids that every contender gets: fresh text for each measured request, held-out text for
quality. Both are files of ids, so that no runtime's tokenizer has a say."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

WINDOW, WINDOWS = 512, 4
RANDOM_TOKENS = 100_000


@dataclass(frozen=True)
class Texts:
    """`speed`: a long text; `windows`: texts of WINDOW tokens, the model's first token included;
    `bos`: that token, None for a model without one."""

    speed: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    bos: int | None


def speed_prompt(texts: Texts, key: Sequence[int], length: int) -> list[int]:
    """A stretch of text that depends on `key` alone, so that all contenders get the same, and that
    no other key is likely to share, so that no cache of prefixes helps."""
    start = int(np.random.default_rng(list(key)).integers(0, len(texts.speed) - length))
    head = [] if texts.bos is None else [texts.bos]
    return [*head, *texts.speed[start : start + length - len(head)]]


def cut_windows(tokens: Sequence[int], bos: int | None) -> tuple[tuple[int, ...], ...]:
    """The first whole windows of a text, WINDOWS at most."""
    head = () if bos is None else (bos,)
    step = WINDOW - len(head)
    starts = range(0, len(tokens) - step + 1, step)[:WINDOWS]
    return tuple((*head, *tokens[start : start + step]) for start in starts)


def random_texts(vocab_size: int) -> Texts:
    """For a model of random weights: speed only."""
    ids = np.random.default_rng(0).integers(0, vocab_size, RANDOM_TOKENS)
    return Texts(tuple(ids.tolist()), (), None)


def texts_of(tokenizer_file: Path, speed: str, quality: str) -> Texts:
    """Tokenize with the model's own tokenizer. Its first token is what it makes of no text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    head = tokenizer.encode("").ids
    bos = int(head[0]) if head else None
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in (speed, quality)]
    return Texts(tuple(ids[0]), cut_windows(ids[1], bos), bos)


def python_documentation() -> str:
    """English prose about code, of which every Python has half a megabyte."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def write_texts(texts: Texts, path: Path) -> None:
    path.write_text(json.dumps(asdict(texts)))


def read_texts(path: Path) -> Texts:
    found = json.loads(path.read_text())
    windows = tuple(tuple(window) for window in found["windows"])
    return Texts(tuple(found["speed"]), windows, found["bos"])
