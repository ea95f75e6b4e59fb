"""Where the time of a step goes: what `bench --breakdown` adds to the document, and its tables."""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from trtllm_lite.runtime.step_timer import PARTS, StepTimes
from trtllm_lite.tools.console import Table

PHASES = ("prefill", "mixed", "decode")
OVERHEAD, TOTAL = "overhead", "total"
LABELS = {part: part for part in PARTS} | {OVERHEAD: "all but run", TOTAL: "whole step"}


def breakdown(steps: Iterable[StepTimes]) -> dict[str, Any]:
    """Of each phase that occurred: how many steps, how many rows and tokens they had, and spreads
    of the seconds of every part, of all parts but the run, and of the whole step."""
    measured = list(steps)
    phases = {phase: [s for s in measured if s.phase == phase] for phase in PHASES}
    return {phase: _phase(found) for phase, found in phases.items() if found}


def breakdown_tables(document: Mapping[str, Any]) -> Iterator[Table]:
    """One table a point of the grid: a row a part, a column a phase."""
    for result in document["results"]:
        phases = result["breakdown"]
        lens = f"{result['input_len']} in, {result['output_len']} out"
        title = f"{lens}, {result['concurrency']} at once: ms a step, median [min, max]"
        columns = ("", *(f"{name} ({found['steps']} steps)" for name, found in phases.items()))
        rows = tuple(_row(name, phases) for name in LABELS)
        yield Table(title, columns, rows, frozenset(range(1, len(columns))))


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Median, least and greatest; None of nothing."""
    known = sorted(values)
    if not known:
        return None
    return {"median": median(known), "min": known[0], "max": known[-1], "count": len(known)}


def _phase(steps: list[StepTimes]) -> dict[str, Any]:
    return {
        "steps": len(steps),
        "decode_rows": spread(s.decode_rows for s in steps),
        "decode_tokens": spread(s.decode_tokens for s in steps),
        "prefill_rows": spread(s.prefill_rows for s in steps),
        "prefill_tokens": spread(s.prefill_tokens for s in steps),
        "seconds": {
            **{part: spread(s.of(part) for s in steps) for part in PARTS},
            OVERHEAD: spread(s.overhead for s in steps),
            TOTAL: spread(s.total for s in steps),
        },
    }


def _row(name: str, phases: Mapping[str, Any]) -> tuple[str, ...]:
    return (LABELS[name], *(_cell(found["seconds"][name]) for found in phases.values()))


def _cell(values: Mapping[str, float]) -> str:
    middle, low, high = (f"{values[key] * 1e3:.3f}" for key in ("median", "min", "max"))
    return f"{middle} [{low}, {high}]"
