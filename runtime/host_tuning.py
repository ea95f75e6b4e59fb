"""Threads, spinning and huge pages for this machine, by a short measured loop.

The loop decodes one row, because that is what a user waits for. Settings take turns, so that a
machine that is busy with something else slows all of them; what counts is the fastest step of each,
and the default is left only for a clear gain in the fastest steps and in the typical ones. A gain
that costs something (a private copy of the weights) has to be larger.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, Protocol, get_args

from trtllm_lite.runtime.backends.base import Spin

Origin = Literal["default", "busy", "measured", "remembered"]
"""Nothing was measured; or it was while other processes kept the machine busy, so the default is
used; or now; or at an earlier time."""

BUDGET_S = 3.0
"""Processor time of all threads after which no further round begins; after half of it no further
setting is opened. Processor time, because a busy machine stretches any other."""
ROUNDS = 8
CALM = 0.15
"""Most of the processors' time that others may take while settings are compared: what is fastest
beside them would be remembered for a machine without them."""
STEPS = 3
"""Steps of a setting in its turn. The first ones wake its threads."""
MARGIN = 0.08
COSTLY_MARGIN = 0.2


@dataclass(frozen=True)
class Setting:
    """One choice. `huge_pages`: see `SessionOptions`."""

    threads: int
    spin: Spin = "brief"
    huge_pages: bool | None = None

    @property
    def margin(self) -> float:
        """The part of the default's time that must be saved before this setting replaces it."""
        return COSTLY_MARGIN if self.huge_pages else MARGIN


@dataclass(frozen=True)
class Tuning:
    """What was picked and how. `step_s`: seconds of the fastest step of each setting that was
    measured, the default first; empty unless measured."""

    setting: Setting
    origin: Origin = "default"
    step_s: tuple[tuple[Setting, float], ...] = ()


def in_words(tuning: Tuning) -> str:
    """ "2 threads, spinning brief (measured)"."""
    threads, spin = tuning.setting.threads, tuning.setting.spin
    count = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{count}, spinning {spin} ({tuning.origin})"


class Loop(Protocol):
    """A session that decodes one row again and again."""

    def step(self) -> None: ...

    def close(self) -> None: ...


def candidates(cores: int, *, private_copies: bool = True) -> tuple[Setting, ...]:
    """The default first, then what is worth a try, most promising first: fewer threads (two
    threads on one core, other work on the machine), no spinning, long spinning, huge pages, which
    take a private copy of the weights."""
    default = Setting(cores)
    fewer = [replace(default, threads=n) for n in sorted({cores - 1, cores // 2} - {0, cores})]
    spins: tuple[Spin, ...] = ("off", "long")
    others = [replace(default, spin=spin) for spin in spins] if cores > 1 else []
    copies = [replace(default, huge_pages=True)] if private_copies else []
    return (default, *reversed(fewer), *others, *copies)


def measure(
    settings: Sequence[Setting],
    open_loop: Callable[[Setting], Loop],
    *,
    clock: Callable[[], float] = time.perf_counter,
    spent: Callable[[], float] = time.process_time,
    others: Callable[[], float | None] = lambda: None,
) -> Tuning:
    """The best of the settings, the first being the default. `clock` times the steps, `spent` is
    held against the budget, `others` tells the part of the processors' time that others took since
    its last call. Whatever `open_loop` and the steps raise goes through, with every loop
    closed."""
    loops: dict[Setting, Loop] = {}
    turns: dict[Setting, list[float]] = {}
    try:
        # Opening the first one includes what is done once per machine.
        loops[settings[0]] = open_loop(settings[0])
        start = spent()
        if _is_busy(others()):
            return Tuning(settings[0], "busy")
        for setting in settings[1:]:
            if spent() - start > BUDGET_S / 2:
                break
            loops[setting] = open_loop(setting)
            loops[setting].step()
        for _ in range(ROUNDS):
            for setting, loop in loops.items():
                turns.setdefault(setting, []).append(_fastest(loop, clock))
            if spent() - start > BUDGET_S:
                break
    finally:
        for loop in loops.values():
            loop.close()
    if _is_busy(others()):
        return Tuning(settings[0], "busy")
    return Tuning(_best(turns), "measured", tuple((s, min(t)) for s, t in turns.items()))


def _is_busy(fraction: float | None) -> bool:
    return fraction is not None and fraction > CALM


def _fastest(loop: Loop, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(STEPS):
        start = clock()
        loop.step()
        times.append(clock() - start)
    return min(times)


def _best(turns: Mapping[Setting, Sequence[float]]) -> Setting:
    """The fastest setting that beats the default, which is the first, by its margin."""
    default = next(iter(turns))
    lowest, typical = min(turns[default]), median(turns[default])
    better = [
        setting
        for setting, times in turns.items()
        if min(times) < lowest * (1 - setting.margin)
        and median(times) < typical * (1 - setting.margin / 2)
    ]
    return min(better, key=lambda setting: min(turns[setting]), default=default)


def to_json(tuning: Tuning, cores: int, backend: str) -> dict[str, Any]:
    """The record of a tuning that was measured with this many cores and this backend."""
    setting = tuning.setting
    return {
        "cores": cores,
        "backend": backend,
        "threads": setting.threads,
        "spin": setting.spin,
        "huge_pages": setting.huge_pages,
    }


def from_json(record: Mapping[str, Any] | None, cores: int, backend: str) -> Tuning | None:
    """The tuning of a record; None where it was made for something else or is damaged."""
    if record is None or (record.get("cores"), record.get("backend")) != (cores, backend):
        return None
    threads, huge = record.get("threads"), record.get("huge_pages")
    spin: Spin | None = next((s for s in get_args(Spin) if s == record.get("spin")), None)
    if type(threads) is not int or not 1 <= threads <= cores or spin is None:
        return None
    if huge is not None and not isinstance(huge, bool):
        return None
    return Tuning(Setting(threads, spin, huge), "remembered")
