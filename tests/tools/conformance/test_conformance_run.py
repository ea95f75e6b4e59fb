"""Fetching, setting up and running a suite; the command's exits."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trtllm_lite.runtime.bundle import open_bundle
from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.runtime.tokenizer import Tokenizer
from trtllm_lite.tools.conformance import __main__ as program
from trtllm_lite.tools.conformance import run
from trtllm_lite.tools.conformance.expected import parse_expected
from trtllm_lite.tools.conformance.fetch import fetched
from trtllm_lite.tools.conformance.judge import ConformanceError, Result
from trtllm_lite.tools.conformance.run import (
    BOOT,
    ROOT,
    Place,
    command,
    environment,
    environment_steps,
    read_results,
    run_suite,
    run_to_the_end,
)
from trtllm_lite.tools.conformance.suites import Archive, Suite
from trtllm_lite.tools.conformance.tool_template import with_tools

ARCHIVE = Archive("some-package", "1.2", "ab" * 32, "src/tests", ("a/test_a.py", "conftest.py"))
SUITE = Suite(
    name="some",
    title="Some suite",
    archive=None,
    home=None,
    tests=("a",),
    requirements=("pytest==1", "x==2"),
    shims=("llamacpp",),
    serve=("--served-model-name", "m"),
    about="About it.",
)


class FakePip:
    """pip that leaves an unpacked archive in its temporary folder, and fails as it does."""

    def __init__(self, version: str = "1.2") -> None:
        self.version = version
        self.calls: list[list[str]] = []
        self.requirements = ""

    def __call__(self, command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        self.calls.append(command)
        self.requirements = Path(command[-1]).read_text()
        tree = Path(env["TMPDIR"]) / "pip-download-x" / "some-package_y"
        (tree / "src/tests/a").mkdir(parents=True)
        (tree / "PKG-INFO").write_text(f"Name: some-package\nVersion: {self.version}\n")
        for name in ("a/test_a.py", "a/test_b.py", "conftest.py"):
            (tree / "src/tests" / name).write_text(name)
        return subprocess.CompletedProcess(command, 1, "", "first\nlast words\n")


def pip(monkeypatch: pytest.MonkeyPatch, fake: FakePip) -> FakePip:
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_an_archive_is_fetched_once_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = pip(monkeypatch, FakePip())
    told: list[str] = []
    home = fetched(ARCHIVE, tmp_path, told.append)
    assert fetched(ARCHIVE, tmp_path, told.append) == home
    assert told == ["fetching some-package 1.2"]
    assert fake.requirements == f"some-package==1.2 --hash=sha256:{'ab' * 32}\n"
    assert "--require-hashes" in fake.calls[0]
    assert files_in(home) == ["a/__init__.py", "a/test_a.py", "conftest.py"]
    assert list(tmp_path.iterdir()) == [home]


def test_a_whole_folder_may_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, FakePip())
    home = fetched(Archive("some-package", "1.2", "ab", "src/tests"), tmp_path, lambda _: None)
    assert files_in(home) == ["a/test_a.py", "a/test_b.py", "conftest.py"]


@pytest.mark.parametrize(
    ("version", "folder", "files", "problem"),
    [
        ("1.3", "src/tests", (), "was not fetched: last words"),
        ("1.2", "tests", (), "has no tests"),
        ("1.2", "src/tests", ("b.py",), "has no src/tests/b.py"),
    ],
)
def test_what_cannot_be_fetched_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    folder: str,
    files: tuple[str, ...],
    problem: str,
) -> None:
    pip(monkeypatch, FakePip(version))
    archive = Archive("some-package", "1.2", "ab", folder, files)
    with pytest.raises(ConformanceError, match=problem):
        fetched(archive, tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_other_requirements_install_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    first, again = environment_steps(SUITE, place), environment_steps(SUITE, place)
    assert first == again
    other = Suite(**{**vars(SUITE), "requirements": ("pytest==1",)})
    assert environment_steps(other, place)[0] == first[0]
    assert environment_steps(other, place)[1].made != first[1].made
    assert first[1].command[-2:] == ("pytest==1", "x==2")


def test_pytest_gets_our_plugins_and_nobodys_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command(SUITE, Place(tmp_path), tmp_path / "home", tmp_path / "bundle")
    plugins = [words[i + 1].rsplit(".", 1)[-1] for i, w in enumerate(words) if w == "-p"]
    assert plugins == ["servers", "recorder", "llamacpp", "no:cacheprovider"]
    assert words[words.index("-c", 4) + 1] == str(tmp_path / "pytest.ini")
    assert words[-1] == "a"
    serve = [word.removeprefix("--serve=") for word in words if word.startswith("--serve=")]
    assert serve[1:] == [
        *("-m", "trtllm_lite", "serve", str(tmp_path / "bundle")),
        *("--served-model-name", "m"),
    ]
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("KEPT", "1")
    found = environment()
    assert "PYTEST_ADDOPTS" not in found
    assert "PYTHONPATH" not in found
    assert (found["KEPT"], found["HF_HUB_OFFLINE"]) == ("1", "1")


TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2, "so it is"
@pytest.mark.parametrize("a", [1, 2])
def test_left(a): raise SystemExit
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken():
    yield
    raise ValueError("at the end")
def test_torn(broken): pass
@pytest.mark.xfail
def test_known(): assert False
"""


def test_the_recorder_writes_what_became_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_t.py").write_text(TESTS)
    (tmp_path / "test_u.py").write_text("import no_such_module")
    (tmp_path / "test_v.py").write_text("import no_such_module")
    (tmp_path / "list").write_text("left out: r\ntest_t.py::test_left\ntest_v.py\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    results = tmp_path / "results"
    recorder = "trtllm_lite.tools.conformance.shims.recorder"
    words = [
        *(
            sys.executable,
            "-c",
            BOOT,
            str(ROOT),
            "-q",
            "-p",
            recorder,
            "-c",
            str(tmp_path / "pytest.ini"),
        ),
        *("--rootdir", str(tmp_path), "-p", "no:cacheprovider", "--continue-on-collection-errors"),
        *("--expected", str(tmp_path / "list"), "--results", str(results)),
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert done.returncode == 1, done.stdout
    found = {result.test: result for result in read_results(results)}
    assert {test: result.outcome for test, result in found.items()} == {
        "test_t.py::test_bad": "failed",
        "test_t.py::test_good": "passed",
        "test_t.py::test_known": "skipped",
        "test_t.py::test_left[1]": "left out",
        "test_t.py::test_left[2]": "left out",
        "test_t.py::test_skipped": "skipped",
        "test_t.py::test_torn": "failed",
        "test_u.py": "failed",
        "test_v.py": "left out",
    }
    assert found["test_t.py::test_bad"].why == "AssertionError: so it is"
    assert found["test_t.py::test_torn"].why == "ValueError: at the end"
    assert "no_such_module" in found["test_u.py"].why


def pytest_ends(
    monkeypatch: pytest.MonkeyPatch, place: Place, code: int, results: Sequence[dict[str, str]]
) -> None:
    """Have pytest leave these results and this code."""

    def fake(*_: object, **__: object) -> object:
        lines = [json.dumps(result) for result in results]
        place.results(SUITE).write_text("\n".join(lines))
        return code

    monkeypatch.setattr(run, "run_to_the_end", fake)
    monkeypatch.setattr(run, "run_steps", lambda *_, **__: [])


def test_a_run_gives_each_test_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path)
    both = [{"test": "b", "outcome": "failed", "why": "w"}, {"test": "a", "outcome": "passed"}]
    pytest_ends(monkeypatch, place, 1, [*both, {"test": "b", "outcome": "passed"}])
    suite = Suite(**{**vars(SUITE), "home": tmp_path})
    results = run_suite(suite, place, tmp_path, lambda _: None)
    assert results == [Result("a", "passed"), Result("b", "passed")]


def test_a_run_that_breaks_off_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path)
    pytest_ends(monkeypatch, place, 3, [])
    with pytest.raises(ConformanceError, match=r"code 3; see .*some\.txt"):
        run_suite(Suite(**{**vars(SUITE), "home": tmp_path}), place, tmp_path, lambda _: None)
    with pytest.raises(ConformanceError, match="neither"):
        run_suite(SUITE, place, tmp_path, lambda _: None)


INTERRUPTED = """
import os, signal, sys, time
try:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
except KeyboardInterrupt:
    print("servers ended")
"""


def test_an_interrupted_run_lets_pytest_end_its_servers(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SystemExit):
            run_to_the_end([sys.executable, "-c", INTERRUPTED], tmp_path, tmp_path / "log")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "log").read_text() == "servers ended\n"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command writes instead of docs/; the triton suite has one passing test."""
    monkeypatch.setattr(program, "MEASUREMENTS", tmp_path)
    monkeypatch.setattr(program, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(program, "with_tools", lambda bundle, *_: bundle)
    return tmp_path


def conformance(*words: str) -> Any:
    return CliRunner().invoke(program.cli, words)


def triton(monkeypatch: pytest.MonkeyPatch, text: str, *results: Result) -> None:
    """Have the suite give these results against a list with this text."""
    monkeypatch.setattr(program, "run_suite", lambda *_: list(results))
    monkeypatch.setattr(program, "read_expected", lambda path: parse_expected(text, path.name))


def test_a_clean_run_is_written_down(
    recorded: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton(monkeypatch, "fails: a reason\nt::b", Result("t::a", "passed"), Result("t::b", "failed"))
    done = conformance("triton", "--bundle", str(tiny_bundle), "--folder", str(recorded / "f"))
    assert done.exit_code == 0, done.output
    assert "triton: 1 passed, 1 failed, 0 skipped, 0 left out" in done.output
    found = json.loads((recorded / "conformance-triton.json").read_text())
    assert (found["counts"]["passed"], found["failed"]) == (1, {"a reason": 1})
    assert "- 1: a reason" in (recorded / "page.md").read_text()


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_a_departure_exits_with_1_and_is_not_written_down(
    recorded: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, outcome: Any
) -> None:
    triton(monkeypatch, "fails: r\nt::b" if outcome == "passed" else "", Result("t::b", outcome))
    done = conformance("triton", "--bundle", str(tiny_bundle), "--folder", str(recorded / "f"))
    assert done.exit_code == 1
    assert "t::b" in done.stderr
    assert not (recorded / "conformance-triton.json").exists()


def test_a_run_may_leave_no_record(
    recorded: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton(monkeypatch, "", Result("t::a", "passed"))
    done = conformance(
        *("triton", "--no-record", "--bundle", str(tiny_bundle), "--folder", str(recorded / "f"))
    )
    assert done.exit_code == 0, done.output
    assert [path.name for path in recorded.iterdir()] == ["f"]


def test_a_template_without_tools_gets_some(tiny_bundle: Path, tmp_path: Path) -> None:
    told: list[str] = []
    bundle = with_tools(tiny_bundle, tmp_path, told.append)
    assert with_tools(tiny_bundle, tmp_path, told.append) == bundle
    assert with_tools(bundle, tmp_path, told.append) == bundle
    assert len(told) == 1
    plain, able = (Tokenizer.from_bundle(open_bundle(b)) for b in (tiny_bundle, bundle))
    asked = [{"role": "user", "content": "a"}]
    tool = {"type": "function", "function": {"name": "f"}}
    function = {"name": "f", "arguments": '{"x": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    answered = [
        *asked,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "98"},
    ]
    assert able.apply_chat_template(asked) == plain.apply_chat_template(asked)
    unchanged = able.apply_chat_template(asked, enable_thinking=True, reasoning_effort="low")
    assert unchanged == plain.apply_chat_template(asked)
    with pytest.raises(RequestError, match="allowed: enable_thinking, reasoning_effort"):
        able.apply_chat_template(asked, other=1)
    text = able.apply_chat_template(answered, tools=[tool])
    assert '[{"type": "function", "function": {"name": "f"}}]' in text
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in text
    assert "<tool_response>\n98\n</tool_response>" in text


def test_a_run_needs_a_bundle_and_a_page_does_not(recorded: Path) -> None:
    assert "--bundle" in conformance("triton").stderr
    assert conformance("--page-only").exit_code == 0
    assert (recorded / "page.md").read_text().startswith("# Conformance")
