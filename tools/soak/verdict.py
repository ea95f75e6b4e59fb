"""The bounds that a soak is held to, and the document that it leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from trtllm_lite.tools.soak.phases import Drift
from trtllm_lite.tools.soak.samples import Sample, megabytes_a_minute
from trtllm_lite.tools.soak.server_process import Ending

MAX_SLOPE = 1.0
"""MB of memory a minute."""
MAX_FREE_SECONDS = 0.2
MAX_AFTER_CROWD_SECONDS = 5.0
MAX_DRIFT = 1.2
MAX_SCHEMAS_GROWTH = 32 * 2**20
SPARE_DESCRIPTORS = 4
"""A second process that renders templates may start late: two pipes."""
SPARE_THREADS = 1
KEPT_SAMPLES = 400


@dataclass(frozen=True)
class Bound:
    """One thing that must hold, and the figure that says whether it does."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True)
class Findings:
    """Of one soak. samples: those after the warm-up. scrapes: seconds of reading /metrics. before,
    after: with nobody inside. golden: the greedy answer at each time that it was asked for.
    numbers: /metrics at the end. left_behind: files, by cycles of an export and a server."""

    minutes: float
    workers: int
    samples: Sequence[Sample]
    scrapes: Sequence[float]
    before: Sample
    after: Sample
    golden: Sequence[str]
    tally: Mapping[str, Any]
    numbers: Mapping[str, float]
    cancellations: Mapping[str, Sequence[float]]
    after_crowd: float
    short: Drift
    schemas: Drift
    ending: Ending
    left_behind: Sequence[str]


def bounds(found: Findings) -> list[Bound]:
    """Everything that must hold."""
    numbers, ending = found.numbers, found.ending
    outcomes = ("finished", "aborted", "failed")
    told = sum(numbers[f"requests_{name}_total"] for name in outcomes)
    missing = abs(numbers["requests_accepted_total"] - told)
    descriptors = found.after.descriptors - found.before.descriptors
    freed = [seconds for times in found.cancellations.values() for seconds in times]
    return [
        Bound("memory slope, MB a minute", megabytes_a_minute(found.samples), MAX_SLOPE),
        Bound("descriptors gained", descriptors, SPARE_DESCRIPTORS),
        Bound("threads gained", found.after.threads - found.before.threads, SPARE_THREADS),
        Bound("requests lost", found.tally["lost"], 0),
        Bound("requests failed", numbers["requests_failed_total"], 0),
        Bound("accepted without an outcome", missing, 0),
        Bound("greedy answers that differ", len(set(found.golden)) - 1, 0),
        Bound("seconds until a slot is free, worst", max(freed, default=0), MAX_FREE_SECONDS),
        Bound("seconds of a request after a crowd", found.after_crowd, MAX_AFTER_CROWD_SECONDS),
        Bound("drift of p99, short requests", found.short.ratio, MAX_DRIFT),
        Bound("bytes gained by distinct schemas", found.schemas.grown, MAX_SCHEMAS_GROWTH),
        Bound("exit code", abs(ending.code), 0),
        Bound("processes that outlived the server", ending.orphans, 0),
        Bound("temporary files left", len(ending.leftovers), 0),
        Bound("files left by exports and servers", len(found.left_behind), 0),
    ]


def document(found: Findings, machine: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of it."""
    checked = bounds(found)
    step = max(1, len(found.samples) // KEPT_SAMPLES)
    return {
        "holds": all(bound.holds for bound in checked),
        "bounds": [{**asdict(bound), "holds": bound.holds} for bound in checked],
        "minutes": found.minutes,
        "workers": found.workers,
        "machine": dict(machine),
        "requests": dict(found.tally["requests"]),
        "faults": list(found.tally["faults"]),
        "scrape_seconds": {"median": median(found.scrapes), "worst": max(found.scrapes)},
        "longest_seconds": found.tally["longest"],
        "numbers": dict(found.numbers),
        "left_behind": list(found.left_behind),
        "before": asdict(found.before),
        "after": asdict(found.after),
        "cancellation_seconds": {k: sorted(v) for k, v in found.cancellations.items()},
        "short": {**asdict(found.short), "ratio": found.short.ratio},
        "schemas": {**asdict(found.schemas), "ratio": found.schemas.ratio},
        "samples": [asdict(sample) for sample in found.samples[::step]],
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """For people: a line a bound."""
    return [
        f"{'ok    ' if each['holds'] else 'BROKEN'} {each['name']}: {each['value']:.4g} "
        f"(limit {each['limit']:g})"
        for each in found["bounds"]
    ]
