"""Find the first stop string that a growing text completes, one character at a time."""

from collections.abc import Sequence


class StopMatcher:
    """Knuth-Morris-Pratt matching of several strings at once: linear in the text, whatever the
    strings, and blind to how the text is cut into pieces.

    The stop that completes first wins; of several that complete at one character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def hold(self) -> int:
        """How many of the last characters may still become the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, str] | None:
        """Read on. Returns (characters of `text` read, the stop they completed), or None.

        Not armed, completed stop strings are passed over; one that is half read stays half read.
        """
        for i, char in enumerate(text):
            completed = self._step(char)
            if armed and completed is not None:
                return i + 1, completed
        return None

    def _step(self, char: str) -> str | None:
        completed = None
        for i, stop in enumerate(self._stops):
            fallback, matched = self._fallbacks[i], self._matched[i]
            while matched and stop[matched] != char:
                matched = fallback[matched]
            matched += stop[matched] == char
            if matched == len(stop):
                completed = completed or stop
                matched = fallback[matched]
            self._matched[i] = matched
        return completed


def _fallback(stop: str) -> list[int]:
    """Entry k: the length of the longest proper prefix of stop[:k] that is also its suffix."""
    table = [0] * (len(stop) + 1)
    length = 0
    for k in range(1, len(stop)):
        while length and stop[k] != stop[length]:
            length = table[length]
        length += stop[k] == stop[length]
        table[k + 1] = length
    return table
