"""The runner: a live server, a client in its environment, and a row that hides nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.clients import runner
from trtllm_lite.tools.clients.__main__ import cli, run_all, tell_row
from trtllm_lite.tools.clients.catalogue import CATALOGUE, Client, chosen
from trtllm_lite.tools.clients.document import document, markdown, server_row
from trtllm_lite.tools.clients.runner import Check, Places, Row, run_script, version_of
from trtllm_lite.tools.clients.scripts.checks import Target

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "docs/measurements/clients.json"
TARGET = Target("http://127.0.0.1:9", "key", "m", 64, "f", "b", "r")


def test_a_client_meets_a_live_server(tiny_bundle: Path, tmp_path: Path) -> None:
    """One client and one server, started, asked and stopped as all of them are."""
    told: list[str] = []
    rows = run_all(chosen(("http",)), tiny_bundle, tmp_path, told.append)
    assert [row.client for row in rows] == ["http", "server"]
    assert [check for row in rows for check in row.failed] == [], told
    assert len(rows[0].checks) >= 5
    assert rows[0].ok
    assert not (tmp_path / "keys.txt").exists()
    found = document(rows, tiny_bundle)
    assert json.loads(json.dumps(found)) == found
    assert "| http.client (Python) |" in markdown(found)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "work").mkdir()
    return Places(tmp_path, tmp_path, {"PATH": "/usr/bin:/bin"})


def shell(path: Path, body: str) -> None:
    """In place of the environment's Python: gets -P -c BOOT ROOT SCRIPT TARGET REPORT."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


LINE = '{"check": "a", "seconds": 0.5, "error": null}'


@pytest.mark.parametrize(
    ("body", "failed"),
    [
        (f"echo '{LINE}' > $7", []),
        (f"echo '{LINE}' > $7; echo why; exit 3", ["exit code 3: why"]),
        ("echo nothing", ["exit code 0: nothing"]),
        (f"echo '{LINE}' > $7; kill -9 $$", ["exit code -9: "]),
    ],
)
def test_a_script_that_ends_badly_is_a_failure(
    places: Places, tmp_path: Path, body: str, failed: list[str]
) -> None:
    shell(tmp_path / "bin" / "python", body)
    client = Client("c", "c", "", ("s",))
    checks = run_script(client, "s", TARGET, tmp_path, places)
    assert [check.error for check in checks if check.error is not None] == failed


def test_a_script_that_hangs_is_ended(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SCRIPT_SECONDS", 0.1)
    shell(tmp_path / "bin" / "python", "sleep 600")
    (check,) = run_script(Client("c", "c", "", ("s",)), "s", TARGET, tmp_path, places)
    assert check.error == "exit code -9: "


def test_a_row_without_checks_has_not_passed() -> None:
    row = Row("c", "C", "1")
    assert not row.ok
    assert replace(row, checks=(Check("a", 0.1),)).ok
    assert not replace(row, checks=(Check("a", 0.1), Check("b", 0.1, "no"))).ok


def test_what_failed_is_told_and_in_the_table() -> None:
    row = Row("c", "C", "1", 2.0, (Check("a", 0.1), Check("b", 0.1, "no")))
    told: list[str] = []
    tell_row(row, told.append)
    tell_row(Row("d", "D", "2", skipped="npm is not installed here"), told.append)
    assert told == ["C 1: 1 of 2 in 2 s", "  b: no", "D 2: not run: npm is not installed here"]
    assert "| C | 1 | 2 | 1 | b |" in markdown({"clients": [row.document()]})


@pytest.mark.parametrize(
    ("code", "log", "failed"),
    [
        (0, "started\n", []),
        (1, "", ["ends with code 0"]),
        (0, "ERROR a request failed\n", ["logs no fault"]),
        (None, "Traceback (most recent call last):", ["ends with code 0", "logs no fault"]),
    ],
)
def test_the_server_is_judged_too(code: int | None, log: str, failed: list[str]) -> None:
    assert [check.check for check in server_row(code, log, 1.0).failed] == failed


def test_an_unknown_name_is_refused_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["run", "nobody", "--bundle", str(tmp_path)])
    assert isinstance(result.exception, UsageError)


def test_the_recorded_run_is_of_all_clients_as_they_are_pinned() -> None:
    """That `docs/conformance.md` has it is checked with the rest of that page."""
    found = json.loads(RECORDED.read_text(encoding="utf-8"))
    recorded = {row["client"]: row for row in found["clients"]}
    assert [*(client.name for client in CATALOGUE), "server"] == list(recorded)
    for client in CATALOGUE:
        if client.package:
            assert recorded[client.name]["version"] == version_of(client)
    assert [name for name, row in recorded.items() if not row["checks"]] == []
