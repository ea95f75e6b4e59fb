"""Builds that can be watched and stopped.

A build is one long call into TensorRT. It runs in a thread of its own and tells a monitor of its
nested phases, from whatever thread; the caller's thread passes that on as progress, and stops the
build when it is interrupted.
Source: NVIDIA TensorRT, IProgressMonitor.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from trtllm_lite.runtime.progress import Progress

POLL_S = 0.1
PARTS = 100

T = TypeVar("T")


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class Watch:
    """How far a build has come; TensorRT's callbacks write it, anyone may read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases: dict[str, _Phase] = {}
        self._cancelled = False
        self._furthest = 0.0

    def cancel(self) -> None:
        """The build ends at its next step."""
        self._cancelled = True

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase begins, inside of `parent`."""
        with self._lock:
            self._phases[name] = _Phase(parent, max(steps, 1))

    def step(self, name: str, step: int) -> bool:
        """Step number `step` of a phase is done. False stops the build."""
        with self._lock:
            if name in self._phases:
                self._phases[name].done = step + 1
        return not self._cancelled

    def finish(self, name: str) -> None:
        """A phase is over."""
        with self._lock:
            self._phases.pop(name, None)

    @property
    def fraction(self) -> float:
        """Of the whole build, 0 to 1; never less than it was."""
        with self._lock:
            roots = [n for n, p in self._phases.items() if p.parent not in self._phases]
            now = self._part(roots[0], len(self._phases)) if roots else 0.0
            self._furthest = max(self._furthest, min(now, 1.0))
            return self._furthest

    def _part(self, name: str, depth: int) -> float:
        phase = self._phases[name]
        inner = [n for n, p in self._phases.items() if p.parent == name]
        inside = self._part(inner[0], depth - 1) if inner and depth > 1 else 0.0
        return (phase.done + min(inside, 1.0)) / phase.steps


def watched(module: Any, build: Callable[[Any], T], progress: Progress) -> T:
    """Runs build(monitor) and reports it as parts of the present step of `progress`. Any exception
    of this thread, Ctrl-C above all, stops the build before it goes on."""
    watch = Watch()
    with ThreadPoolExecutor(1, thread_name_prefix="build") as pool:
        future = pool.submit(build, _make_monitor(module, watch))
        try:
            _follow(future, watch, progress)
        except BaseException:
            watch.cancel()
            raise
        return future.result()


def _follow(future: "Future[T]", watch: Watch, progress: Progress) -> None:
    told = -1
    while wait([future], timeout=POLL_S).not_done:
        done = int(PARTS * watch.fraction)
        if done != told:
            progress.advance(done, PARTS, "parts")
        told = done


def _make_monitor(module: Any, watch: Watch) -> Any:
    class Monitor(module.IProgressMonitor):  # type: ignore[misc]  # a class known at run time only
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            watch.start(name, parent, steps)

        def step_complete(self, name: str, step: int) -> bool:
            return watch.step(name, step)

        def phase_finish(self, name: str) -> None:
            watch.finish(name)

    return Monitor()
