"""How long work reports itself: named steps, amounts inside a step, and notes.

The worker calls; whoever shows progress decides how often and where. Calls are cheap and may be
made from one thread only.
"""

from typing import Protocol


class Progress(Protocol):
    """Receives the reports of one piece of long work."""

    def step(self, name: str) -> None:
        """A new step begins, which ends the one before: "trace prefill"."""

    def advance(self, done: int, total: int, unit: str) -> None:
        """`done` of `total` units ("bytes", "tokens") of the step; total 0 is an unknown total."""

    def note(self, text: str) -> None:
        """One line worth telling, apart from any amount."""


class NoProgress:
    """Shows nothing."""

    def step(self, name: str) -> None:
        """Ignore the step."""

    def advance(self, done: int, total: int, unit: str) -> None:
        """Ignore the amount."""

    def note(self, text: str) -> None:
        """Ignore the note."""
