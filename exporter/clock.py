"""How long the steps of an export take."""

import time

from trtllm_lite.runtime.progress import Progress


class Clock:
    """A Progress that times the steps on their way to the real one. `seconds` are by step; one
    that is done twice has the sum."""

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self._name, self._since = "", time.monotonic()
        self.seconds: dict[str, float] = {}

    def step(self, name: str) -> None:
        now = time.monotonic()
        if self._name:
            spent = self.seconds.get(self._name, 0.0) + now - self._since
            self.seconds[self._name] = round(spent, 3)
        self._name, self._since = name, now
        if name:
            self._inner.step(name)

    def advance(self, done: int, total: int, unit: str) -> None:
        self._inner.advance(done, total, unit)

    def note(self, text: str) -> None:
        self._inner.note(text)
