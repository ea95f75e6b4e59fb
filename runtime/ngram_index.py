"""Where a sequence has said the same before: the last place of every short run of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """What followed the last time: `length` tokens at the end of the sequence stand earlier in it
    too, and `tokens` is what came after them there."""

    length: int
    tokens: tuple[int, ...]


class NgramIndex:
    """Every run of `shortest` to `longest` tokens of one growing sequence, by its last place.

    The sequence is read once: each token costs one entry per run length, whatever came before it.
    A run counts from the moment on that a token follows it, so the end of the sequence never
    matches itself.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        """Run -> place of the token that followed it last."""
        self._read = 1
        """Places below this one are the ends of runs that are in the index."""

    def match(self, token_ids: Sequence[int], most: int) -> Match | None:
        """The continuation of the last earlier place of the longest run that ends `token_ids`, as
        `most` tokens, or None. `token_ids` may only have grown since the last call.

        A continuation that reaches the end goes on with itself, as a loop would: "abab" + "abab".
        """
        self._extend(token_ids)
        for length in self._lengths:
            place = self._next.get(tuple(token_ids[-length:]))
            if place is not None and length <= len(token_ids):
                tail = list(token_ids[place : place + most])
                while len(tail) < most:
                    tail.append(tail[len(tail) + place - len(token_ids)])
                return Match(length, tuple(tail))
        return None

    def _extend(self, token_ids: Sequence[int]) -> None:
        for place in range(self._read, len(token_ids)):
            for length in self._lengths:
                if length <= place:
                    self._next[tuple(token_ids[place - length : place])] = place
        self._read = max(self._read, len(token_ids))
