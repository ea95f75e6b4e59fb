"""The eighty cases of docs/robustness.md: all there, each with tests that exist. And what no test
of behaviour can show."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
CASES = 80
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
UNPACKERS = {"tarfile", "zipfile", "pickle", "shelve", "marshal", "dill", "joblib"}
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
# What compares with the times of files, or tells a template the day.
TELLING = {
    "runtime/chat_template.py",
    "runtime/server/replicas/numbers.py",
    "runtime/verified_files.py",
}


def rows() -> list[tuple[int, str, str]]:
    text = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
    return [(int(number), what, tests) for number, what, tests in ROW.findall(text)]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def names_in(name: str) -> set[str]:
    """Names of the tests of a file below tests/; none when it is not there."""
    path = TESTS / name
    if not path.is_file():
        return set()
    return {
        node.name
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    }


def test_every_case_is_there_once_and_in_order() -> None:
    assert [number for number, _, _ in rows()] == list(range(1, CASES + 1))


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row[0]))
def test_every_case_has_tests_that_exist(row: tuple[int, str, str]) -> None:
    number, what, named = row
    found = NAMED.findall(named)
    assert what.strip()
    assert found, f"case {number} names no test"
    assert re.sub(NAMED, "", named).strip(", ") == ""
    missing = [f"{file}::{test}" for file, test in found if test not in names_in(file)]
    assert missing == []


def runtime_files() -> Iterator[Path]:
    yield from sorted((ROOT / "runtime").rglob("*.py"))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_nothing_unpacks_archives_or_pickles() -> None:
    files = [path for part in ("runtime", "exporter") for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
        if name.partition(".")[0] in UNPACKERS
    ]
    assert found == []


def test_nothing_is_evaluated() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in runtime_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and dotted(node.func) in ("eval", "exec", "compile")
    ]
    assert found == []


def test_nothing_is_timed_by_the_clock_on_the_wall() -> None:
    """What it says in whole seconds is for people: the `created` of an answer."""
    found = {str(path.relative_to(ROOT)) for path in runtime_files() if looks_at_the_wall(path)}
    assert found - TELLING == set()
    assert found & TELLING


def looks_at_the_wall(path: Path) -> bool:
    tree = parse(path)
    whole = {
        id(argument.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func) == "int"
        for argument in node.args
        if isinstance(argument, ast.Call)
    }
    clocks = (
        n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and dotted(n) in WALL_CLOCKS
    )
    return any(id(node) not in whole for node in clocks)
