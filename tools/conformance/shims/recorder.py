"""Leaves tests out as the list says, and writes what became of every test as JSON lines."""

import json
from pathlib import Path

import pytest

from trtllm_lite.tools.conformance.expected import Expected, read_expected

MAX_WHY = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--expected", type=Path, help="The list of what fails and is left out.")
    group.addoption("--results", type=Path, help="Where the outcomes go.")


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder(
        read_expected(config.getoption("--expected")), config.getoption("--results")
    )
    config.pluginmanager.register(recorder, "conformance-recorder")


class Recorder:
    """One line a test, as soon as it is known: what a crash leaves behind is still true."""

    def __init__(self, expected: Expected, path: Path) -> None:
        self._expected = expected
        self._path = path
        self._failed: dict[str, str] = {}
        self._skipped: set[str] = set()
        path.write_text("", encoding="utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = [item for item in items if self._is_left_out(item.nodeid)]
        for item in left_out:
            self._write(item.nodeid, "left out")
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not self._is_left_out(item.nodeid)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported counts as one test."""
        if report.failed:
            left_out = self._is_left_out(report.nodeid)
            why = "" if left_out else why_of(report)
            self._write(report.nodeid, "left out" if left_out else "failed", why)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        if report.failed:
            self._failed.setdefault(test, why_of(report))
        elif report.skipped:
            self._skipped.add(test)
        if report.when != "teardown":
            return
        if test in self._failed:
            self._write(test, "failed", self._failed[test])
        else:
            self._write(test, "skipped" if test in self._skipped else "passed")

    def _is_left_out(self, test: str) -> bool:
        entry = self._expected.entry(test)
        return entry is not None and entry.left_out

    def _write(self, test: str, outcome: str, why: str = "") -> None:
        with self._path.open("a", encoding="utf-8") as file:
            json.dump({"test": test, "outcome": outcome, "why": why}, file)
            file.write("\n")


def why_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of the error; of a file that cannot be imported the last, which names it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).strip().partition("\n")[0][:MAX_WHY]
    return report.longreprtext.strip().rpartition("\n")[2].removeprefix("E").strip()[:MAX_WHY]
