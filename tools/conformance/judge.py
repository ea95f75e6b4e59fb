"""Results of a run against what was expected. A list of known failures may only shrink."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.tools.conformance.expected import Entry, Expected

Outcome = Literal["passed", "failed", "skipped", "left out"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class ConformanceError(TrtllmLiteError):
    """A suite could not be fetched, set up or run to its end."""


@dataclass(frozen=True)
class Result:
    """What became of one test. `why`: the first line of its error, empty without one."""

    test: str
    outcome: Outcome
    why: str = ""

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Result":
        """Raises ConformanceError for anything that the recorder does not write."""
        outcome = found.get("outcome")
        if outcome not in OUTCOMES:
            raise ConformanceError(f"a test's outcome is {outcome!r}; allowed: {OUTCOMES}")
        return cls(str(found["test"]), outcome, str(found.get("why", "")))


@dataclass(frozen=True)
class Judgement:
    """Where a run departs from its list.

    failed: not on the list, or left out and run all the same. passed: on the list of failures.
    stale: names on the list that no test of the run has, or only such as were skipped.
    """

    failed: tuple[Result, ...]
    passed: tuple[str, ...]
    stale: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not (self.failed or self.passed or self.stale)

    def lines(self) -> Iterator[str]:
        """What to do, one line each."""
        for result in self.failed:
            yield f"fails and is not on the list: {result.test}: {result.why}"
        for test in self.passed:
            yield f"passes, take it off the list: {test}"
        for name in self.stale:
            yield f"no such test ran, take it off the list: {name}"


def judge(results: Iterable[Result], expected: Expected) -> Judgement:
    """Every result against the entry that covers its test."""
    failed, passed, met = list[Result](), list[str](), set[str]()
    for result in results:
        entry = expected.entry(result.test)
        if entry is not None and result.outcome != "skipped":
            met.add(entry.name)
        if result.outcome == "failed" and entry is None:
            failed.append(result)
        elif result.outcome == "passed" and entry is not None:
            passed.append(result.test)
    stale = [entry.name for entry in expected.entries if entry.name not in met]
    return Judgement(tuple(failed), tuple(passed), tuple(stale))


def counts(results: Iterable[Result]) -> dict[str, int]:
    """How many results of each outcome."""
    made = dict.fromkeys(OUTCOMES, 0)
    for result in results:
        made[result.outcome] += 1
    return {outcome: made[outcome] for outcome in OUTCOMES}


def by_file(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    """The counts of each file of tests, in alphabetical order."""
    files = sorted({file_of(result.test) for result in results})
    return {
        name: counts(result for result in results if file_of(result.test) == name) for name in files
    }


def file_of(test: str) -> str:
    return test.partition("::")[0]


def by_reason(results: Iterable[Result], expected: Expected, outcome: Outcome) -> dict[str, int]:
    """How many tests of this outcome each reason of the list explains, most first."""
    entries = [expected.entry(result.test) for result in results if result.outcome == outcome]
    reasons = [entry.reason for entry in entries if isinstance(entry, Entry)]
    found = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
