"""The runner of Schemathesis, with a program that stands in for it, and our check in it."""

import json
import stat
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from trtllm_lite.tools.conformance.judge import ConformanceError
from trtllm_lite.tools.conformance.schemathesis_run import document, run
from trtllm_lite.tools.conformance.toy import toy_server

REPORT: dict[str, Any] = {
    "schemathesis_version": "4",
    "seed": 7,
    "operations": {"tested": 3, "errored": 1},
    "phases": {"fuzzing": {"status": "failure"}},
    "test_cases": {"generated": 90, "unique_failures": 2, "errored": 1},
}
PROGRAM = """#!{python}
import json, os, sys
from pathlib import Path
place = Path(sys.argv[sys.argv.index("--report-json-path") + 1])
hooks = Path(os.environ["PYTHONPATH"], os.environ["SCHEMATHESIS_HOOKS"] + ".py")
told = {{"arguments": sys.argv[1:], "hooks": hooks.is_file()}}
if {writes}:
    place.write_text(json.dumps(told))
sys.exit({code})
"""


def program(folder: Path, code: int = 0, *, writes: bool = True) -> Path:
    path = folder / "st"
    path.write_text(PROGRAM.format(python=sys.executable, code=code, writes=writes))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("code", [0, 1])
def test_the_program_gets_the_document_our_check_and_the_options(tmp_path: Path, code: int) -> None:
    made = run(program(tmp_path, code), "http://127.0.0.1:1", tmp_path, ("--seed", "7"))
    arguments = made["arguments"]
    assert arguments[:2] == ["run", "http://127.0.0.1:1/openapi.json"]
    assert arguments[-2:] == ["--seed", "7"]
    assert arguments[arguments.index("--mode") + 1] == "all"
    assert made["hooks"] is True


def test_a_run_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match="code 2"):
        run(program(tmp_path, 2), "http://127.0.0.1:1", tmp_path)
    with pytest.raises(ConformanceError, match="code 0"):
        run(program(tmp_path, writes=False), "http://127.0.0.1:1", tmp_path)


def test_figures_are_those_of_the_report() -> None:
    made = document(REPORT)
    assert (made["requests"], made["failures"], made["errors"]) == (90, 2, 2)
    assert (made["operations"], made["phases"]) == (3, {"fuzzing": "failure"})
    for name in REPORT:
        with pytest.raises(ConformanceError, match=name):
            document({k: v for k, v in REPORT.items() if k != name})


def test_a_server_with_a_key_serves_the_document_to_who_has_it() -> None:
    with toy_server("k") as url, httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/openapi.json").status_code == 401
        found = client.get("/openapi.json", headers={"x-api-key": "k"})
        assert "security" in found.json()["paths"]["/v1/models"]["get"]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our check, as the program calls it."""
    library = ModuleType("schemathesis")
    library.__dict__["check"] = lambda function: function
    monkeypatch.setitem(sys.modules, "schemathesis", library)
    name = "trtllm_lite.tools.conformance.schemathesis_hooks"
    monkeypatch.delitem(sys.modules, name, raising=False)
    hooks: Any = import_module(name)
    monkeypatch.delitem(sys.modules, name)

    def call(status: int, message: str = "", *, body: Any = None, positive: bool = True) -> None:
        data = json.dumps({"error": {"message": message}})
        response = SimpleNamespace(status_code=status, json=lambda: json.loads(data))
        mode = SimpleNamespace(mode=SimpleNamespace(is_positive=positive))
        case = SimpleNamespace(meta=SimpleNamespace(generation=mode), body=body)
        hooks.accepted_or_explained(None, response, case)

    return call


def test_a_body_that_fits_is_accepted_or_refused_for_a_known_reason(check: Any) -> None:
    check(200)
    check(400, "prompt: the maximum context length is 5 tokens; got 6")
    check(400, "tools: not together with guided_json")
    check(400, "anything", positive=False)
    check(400, "prompt.str: Input should be a valid string", body={"prompt": [1.0]})
    for status, message in ((400, "n: Input should be less than 5"), (500, "not together with")):
        with pytest.raises(AssertionError, match=str(status)):
            check(status, message, body={"temperature": 1.5})
