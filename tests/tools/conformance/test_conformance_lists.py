"""Lists of what fails, and how a run is held against them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.conformance.document import read_beside, read_documents
from trtllm_lite.tools.conformance.expected import Entry, parse_expected, read_expected
from trtllm_lite.tools.conformance.judge import (
    ConformanceError,
    Result,
    by_file,
    by_reason,
    counts,
    judge,
)
from trtllm_lite.tools.conformance.page import page
from trtllm_lite.tools.conformance.run import ROOT
from trtllm_lite.tools.conformance.suites import SUITES

LIST = """
# a comment
fails: it is so by design
a/test_x.py::test_one
a/test_x.py::test_two[b-c d]

left out: it needs a GPU
  a/gpu
fails: the second reason
a/test_y.py
"""
MEASUREMENTS = ROOT / "docs" / "measurements"


def failed(test: str) -> Result:
    return Result(test, "failed", "because")


def passed(test: str) -> Result:
    return Result(test, "passed")


ALL = (
    failed("a/test_x.py::test_one[p]"),
    failed("a/test_x.py::test_two[b-c d]"),
    Result("a/gpu/test_z.py::test_z", "left out"),
    failed("a/test_y.py::Test::test_y"),
    passed("a/test_x.py::test_one_more"),
)


def test_entries_keep_name_reason_and_kind() -> None:
    entries = parse_expected(LIST, "l").entries
    assert entries[0] == Entry("a/test_x.py::test_one", "it is so by design", left_out=False)
    assert entries[2] == Entry("a/gpu", "it needs a GPU", left_out=True)
    assert [e.name for e in entries[1::2]] == ["a/test_x.py::test_two[b-c d]", "a/test_y.py"]


@pytest.mark.parametrize(
    ("test", "covered"),
    [
        ("a/test_x.py::test_one", True),
        ("a/test_x.py::test_one[p]", True),
        ("a/test_x.py::test_one::inner", True),
        ("a/test_x.py::test_one_more", False),
        ("a/test_x.py", False),
        ("b/a/test_x.py::test_one", False),
    ],
)
def test_a_name_covers_its_cases_alone(test: str, covered: bool) -> None:
    assert Entry("a/test_x.py::test_one", "r", left_out=False).covers(test) is covered


def test_the_longest_name_counts() -> None:
    expected = parse_expected("left out: a\nt.py\nfails: b\nt.py::one\n", "l")
    found = [expected.entry(test) for test in ("t.py::one[1]", "t.py::two", "u.py::one")]
    assert [entry and entry.reason for entry in found] == ["b", "a", None]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a.py\n", "l:1: got 'a.py' before"),
        ("fails:\na.py\n", "l:1: 'fails:' gives no reason"),
        ("fails: x\na.py\n\nleft out: y\na.py\n", "l:5: a.py is there twice"),
    ],
)
def test_a_wrong_list_is_refused_by_line(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_expected(text, "l")


def test_a_run_as_expected_is_clean() -> None:
    verdict = judge(ALL, parse_expected(LIST, "l"))
    assert verdict.clean
    assert list(verdict.lines()) == []


def test_a_new_failure_is_one() -> None:
    verdict = judge([*ALL, failed("a/new.py::test_n")], parse_expected(LIST, "l"))
    assert not verdict.clean
    (line,) = verdict.lines()
    assert line.startswith("fails and is not on the list: a/new.py::test_n: because")


def test_a_listed_test_that_passes_is_one() -> None:
    results = [replace(ALL[0], outcome="passed"), *ALL[1:]]
    verdict = judge(results, parse_expected(LIST, "l"))
    assert verdict.passed == ("a/test_x.py::test_one[p]",)
    assert not verdict.clean


@pytest.mark.parametrize("outcome", [None, "skipped"])
def test_a_name_without_a_test_is_one(outcome: Any) -> None:
    instead = () if outcome is None else (replace(ALL[3], outcome=outcome),)
    verdict = judge([*ALL[:3], ALL[4], *instead], parse_expected(LIST, "l"))
    assert verdict.stale == ("a/test_y.py",)
    assert not verdict.clean


def test_counts_and_reasons() -> None:
    expected = parse_expected(LIST, "l")
    assert counts(ALL) == {"passed": 1, "failed": 3, "skipped": 0, "left out": 1}
    assert by_file(ALL)["a/test_x.py"] == {"passed": 1, "failed": 2, "skipped": 0, "left out": 0}
    assert by_reason(ALL, expected, "failed") == {"it is so by design": 2, "the second reason": 1}
    assert by_reason(ALL, expected, "left out") == {"it needs a GPU": 1}


def test_a_result_of_another_kind_is_refused() -> None:
    with pytest.raises(ConformanceError, match="maybe"):
        Result.from_json({"test": "t", "outcome": "maybe"})


def test_the_page_is_that_of_the_recorded_runs() -> None:
    made = page(read_documents(MEASUREMENTS), read_beside(MEASUREMENTS))
    assert (ROOT / "docs" / "conformance.md").read_text() == made


@pytest.mark.parametrize("name", sorted(SUITES))
def test_a_recorded_run_is_of_todays_suite_and_list(name: str) -> None:
    """Whoever changes a list or a suite runs it again."""
    suite = SUITES[name]
    found = json.loads((MEASUREMENTS / f"conformance-{name}.json").read_text())
    entries = read_expected(suite.expected).entries
    assert found["failed"].keys() == {e.reason for e in entries if not e.left_out}
    assert found["left_out"].keys() == {e.reason for e in entries if e.left_out}
    assert sum(found["failed"].values()) == found["counts"]["failed"]
    assert (found["title"], found["about"]) == (suite.title, suite.about)
    assert found["counts"]["passed"] > 0
    totals = [sum(row[outcome] for row in found["files"].values()) for outcome in found["counts"]]
    assert totals == list(found["counts"].values())


@pytest.mark.parametrize("name", sorted(SUITES))
def test_a_suite_is_pinned(name: str) -> None:
    suite = SUITES[name]
    assert suite.name == name
    assert [package for package in suite.requirements if "==" not in package] == []
    if suite.archive is None:
        assert suite.home is not None
        assert list(suite.home.glob("test_*.py"))
    else:
        assert len(bytes.fromhex(suite.archive.sha256)) == 32


def test_the_suites_lists_are_the_ones_there_are() -> None:
    lists = {path.stem for path in Path(SUITES["vllm"].expected).parent.glob("*.txt")}
    assert lists == SUITES.keys()
