"""The bounds of a soak: each of them can break, and the document says so."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from trtllm_lite.tools.soak.phases import Drift
from trtllm_lite.tools.soak.samples import Sample, megabytes_a_minute
from trtllm_lite.tools.soak.server_process import Ending
from trtllm_lite.tools.soak.verdict import Findings, bounds, document, lines

QUIET = Sample(0.0, 500_000_000, 20, 10, 1)
FLAT = [Sample(i * 5.0, 500_000_000 + i % 2 * 1_000_000, 30, 10, 1) for i in range(100)]
GOOD = Findings(
    minutes=30,
    workers=12,
    samples=FLAT,
    scrapes=[0.01, 0.02],
    before=QUIET,
    after=QUIET,
    golden=("red", "red", "red"),
    tally={"lost": 0, "requests": {"whole": 5}, "faults": [], "longest": 2.0},
    numbers={
        "requests_accepted_total": 10,
        "requests_finished_total": 7,
        "requests_aborted_total": 3,
        "requests_failed_total": 0,
    },
    cancellations={"streaming": [0.01, 0.1], "waiting": [0.02]},
    after_crowd=1.0,
    short=Drift(100, 0.1, 0.11, 0),
    schemas=Drift(100, 0.1, 0.11, 2**20),
    ending=Ending(0, 0, []),
    left_behind=[],
)


def numbers(**changed: float) -> dict[str, float]:
    return {**GOOD.numbers, **{f"requests_{name}_total": n for name, n in changed.items()}}


BROKEN: dict[str, Callable[[], Findings]] = {
    "memory slope, MB a minute": lambda: replace(
        GOOD, samples=[replace(s, rss=s.rss + int(s.seconds * 20_000)) for s in FLAT]
    ),
    "descriptors gained": lambda: replace(GOOD, after=replace(QUIET, descriptors=25)),
    "threads gained": lambda: replace(GOOD, after=replace(QUIET, threads=12)),
    "requests lost": lambda: replace(GOOD, tally={**GOOD.tally, "lost": 1}),
    "requests failed": lambda: replace(GOOD, numbers=numbers(failed=1, finished=6)),
    "accepted without an outcome": lambda: replace(GOOD, numbers=numbers(accepted=11)),
    "greedy answers that differ": lambda: replace(GOOD, golden=("red", "red", "blue")),
    "seconds until a slot is free, worst": lambda: replace(GOOD, cancellations={"waiting": [0.3]}),
    "seconds of a request after a crowd": lambda: replace(GOOD, after_crowd=6),
    "drift of p99, short requests": lambda: replace(GOOD, short=Drift(100, 0.1, 0.13, 0)),
    "bytes gained by distinct schemas": lambda: replace(GOOD, schemas=Drift(9, 1, 1, 2**26)),
    "exit code": lambda: replace(GOOD, ending=Ending(-9, 0, [])),
    "processes that outlived the server": lambda: replace(GOOD, ending=Ending(0, 1, [])),
    "files left by exports and servers": lambda: replace(GOOD, left_behind=["x"]),
    "temporary files left": lambda: replace(GOOD, ending=Ending(0, 0, ["x"])),
}


def test_a_good_soak_holds() -> None:
    made = document(GOOD, {"python": "3"})
    assert made["holds"]
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert all(line.startswith("ok") for line in lines(made))


@pytest.mark.parametrize("name", [bound.name for bound in bounds(GOOD)])
def test_every_bound_can_break(name: str) -> None:
    made = document(BROKEN[name](), {})
    assert not made["holds"]
    assert [bound["name"] for bound in made["bounds"] if not bound["holds"]] == [name]
    assert len([line for line in lines(made) if line.startswith("BROKEN")]) == 1


def test_the_slope_is_that_of_the_memory() -> None:
    rising = [Sample(i * 5.0, 10**8 + i * 250_000, 1, 1, 0) for i in range(50)]
    assert megabytes_a_minute(rising) == pytest.approx(3.0)
    assert abs(megabytes_a_minute(FLAT)) < 0.05
    assert megabytes_a_minute(rising[:1]) == megabytes_a_minute([]) == 0
