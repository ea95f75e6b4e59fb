"""Requests that nobody waits for any more while the run that computes them is still going."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Unwanted:
    """Owns the ids of requests that are about to be aborted, and of those in the present run. When
    the latter are all among the former, `interrupt` is called: the run is given up.

    Any thread may call `add` and `give_up`, finalizers included, so that there is no lock: an
    interrupt may come too late, and meet the run after the one that it was meant for. Whoever runs
    asks `covers`, and runs again what was interrupted by mistake.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._ids: set[str] = set()
        self._running: frozenset[str] = frozenset()

    def add(self, request_ids: Iterable[str]) -> None:
        """Before their abort is handed to the thread that runs, which calls `remove`."""
        self._ids.update(request_ids)

    def give_up(self) -> None:
        """End the present run if it is for nobody."""
        if self.covers(self._running):
            self._interrupt()

    def remove(self, request_ids: Iterable[str]) -> None:
        """They are aborted: their ids may come again."""
        self._ids.difference_update(request_ids)

    def covers(self, request_ids: frozenset[str]) -> bool:
        """Whether nobody waits for any of these; False for none."""
        return bool(request_ids) and all(id in self._ids for id in request_ids)

    @contextmanager
    def running(self, request_ids: frozenset[str]) -> Iterator[None]:
        """A run of these requests may be given up inside."""
        self._running = request_ids
        try:
            yield
        finally:
            self._running = frozenset()
