"""The Makefile's promises that need no installation."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a fresh shell: the suite itself may run under `make test PYTHON=...`."""
    inherited = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "PYTHON", "ARGS")
    env = {k: v for k, v in os.environ.items() if k not in inherited}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_python(folder: Path, version: str) -> Path:
    """A program that fails every check and says that it is this Python."""
    body = f'[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit 1'
    return program(folder / "old-python", body)


def test_plain_make_lists_every_target(folder: Path) -> None:
    text = (folder / "Makefile").read_text()
    phony = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)[0].split()
    listed = [line.split()[1] for line in make(folder).stdout.splitlines()]
    assert listed == phony


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_an_old_python_is_refused_in_one_line(folder: Path, target: str) -> None:
    result = make(folder, target, f"PYTHON={fake_python(folder, '3.9.2')}")
    assert result.returncode != 0
    line = next(x for x in result.stderr.splitlines() if "3.11 or newer" in x)
    assert "Python 3.9.2" in line
    assert "make PYTHON=" in line
    assert not (folder / ".venv").exists()


def test_a_missing_python_is_refused_too(folder: Path) -> None:
    result = make(folder, "demo", "PYTHON=/no/such/python")
    assert result.returncode != 0
    assert "3.11 or newer" in result.stderr


def test_changed_pins_install_again(folder: Path) -> None:
    """The stamps follow the content of the two files, so a new pin cannot be skipped."""

    def steps() -> list[str]:
        text = make(folder, "--dry-run", "demo", "PYTHON=python3").stdout
        return re.findall(r"touch (\S+)", text)

    before = steps()
    assert before == steps()
    with (folder / "constraints.txt").open("a") as file:
        file.write("numpy==0\n")
    assert set(before).isdisjoint(steps())


def test_the_ci_entry_runs_checks_and_tests_and_passes_failures_on(folder: Path) -> None:
    programs, script = folder / "bin", folder / ".ci" / "run"
    programs.mkdir()
    program(programs / "make", 'echo "make in $PWD: $*"\nexit 3')
    script.parent.mkdir()
    shutil.copy2(ROOT / ".ci" / "run", script)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    result = subprocess.run([script], cwd="/", env=env, capture_output=True, text=True)
    assert result.returncode == 3
    assert result.stdout == f"make in {folder}: --no-print-directory check test\n"
