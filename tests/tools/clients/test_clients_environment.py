"""Environments: exact versions, made once, and proxies that lead nowhere."""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.clients.catalogue import CATALOGUE, Client, chosen, requirements
from trtllm_lite.tools.clients.environment import (
    CLOSED,
    InstallError,
    ensure,
    install_commands,
    offline,
    python_of,
)

BARE = Client("bare", "bare", "", ("none",))
NODE = Client("node", "node", "ai", ("none",), "node")


def test_an_environment_is_made_once_for_its_versions(tmp_path: Path) -> None:
    log = tmp_path / "log"
    home = ensure(BARE, {}, tmp_path, log)
    code = "import sys; print(sys.prefix != sys.base_prefix)"
    said = subprocess.run([python_of(home), "-c", code], capture_output=True, text=True)
    assert said.stdout == "True\n"
    (home / "kept").touch()
    assert ensure(BARE, {}, tmp_path, log) == home
    assert (home / "kept").exists()
    (home / ".complete").write_text("other versions")
    ensure(BARE, {}, tmp_path, log)
    assert not (home / "kept").exists()


def test_a_failed_installation_is_told_and_tried_again(tmp_path: Path) -> None:
    pins = {"not a package": "1"}
    for _ in range(2):
        with pytest.raises(InstallError, match=r"the installation failed; see .*log"):
            ensure(BARE, pins, tmp_path, tmp_path / "log")
    assert "not a package" in (tmp_path / "log").read_text()


def test_pip_resolves_nothing(tmp_path: Path) -> None:
    _, pip = install_commands(BARE, {"a": "1.0", "b": "2"}, tmp_path)
    assert list(pip[-3:]) == ["--no-deps", "a==1.0", "b==2"]


def test_npm_runs_no_scripts_of_packages(tmp_path: Path) -> None:
    (npm,) = install_commands(NODE, {"ai": "6.0.0"}, tmp_path)
    assert "--ignore-scripts" in npm
    written = json.loads((tmp_path / "package.json").read_text())
    assert written["dependencies"] == {"ai": "6.0.0"}


def test_a_client_gets_proxies_that_lead_nowhere_and_no_keys_of_ours(tmp_path: Path) -> None:
    given = {"OPENAI_API_KEY": "secret", "PATH": "/bin", "HTTPS_PROXY": "http://proxy", "LLM_X": ""}
    made = offline(given, tmp_path)
    assert "OPENAI_API_KEY" not in made
    assert "LLM_X" not in made
    assert made["PATH"] == "/bin"
    assert made["HTTPS_PROXY"] == made["https_proxy"] == CLOSED
    assert made["HF_HUB_OFFLINE"] == "1"


def test_every_client_is_pinned_exactly() -> None:
    for client in CATALOGUE:
        pins = requirements(client)
        assert [v for v in pins.values() if not re.fullmatch(r"[0-9][\w.+-]*", v)] == []
        assert not client.package or client.package in pins


def test_every_script_is_there_and_checks_something() -> None:
    names = [name for client in CATALOGUE for name in client.scripts]
    assert len(names) == len(set(names))
    for client in CATALOGUE:
        for name in client.scripts:
            text = client.script(name).read_text(encoding="utf-8")
            if client.language == "node":
                assert "await run({" in text
                continue
            functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
            checks = [f for f in functions if not f.name.startswith("_")]
            assert checks
            assert [f.name for f in checks if [a.arg for a in f.args.args] != ["target"]] == []


def test_clients_are_chosen_by_name() -> None:
    assert chosen(()) == list(CATALOGUE)
    assert [client.name for client in chosen(("litellm", "http"))] == ["http", "litellm"]
    with pytest.raises(UsageError, match="no client 'x'; known: http, openai"):
        chosen(("x",))
