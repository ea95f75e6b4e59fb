"""Runs a client's scripts in its environment, and reads what they found."""

import json
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trtllm_lite
from trtllm_lite.tools.clients.catalogue import Client, requirements
from trtllm_lite.tools.clients.environment import InstallError, ensure, offline, python_of
from trtllm_lite.tools.clients.scripts.checks import Target

SCRIPT_SECONDS = 900
ROOT = Path(trtllm_lite.__file__).resolve().parent.parent
LAST = 300
"""Characters of a script's own output that a crash is reported with."""

# The checkout goes to the end of the path, so that the environment's own packages come first.
BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from trtllm_lite.tools.clients.scripts.checks import main; main(*sys.argv[2:])"
)


@dataclass(frozen=True)
class Check:
    """One check. error: what was wrong; None when it passed."""

    check: str
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Row:
    """What became of one client. skipped: why it was not run."""

    client: str
    title: str
    version: str
    seconds: float = 0.0
    checks: tuple[Check, ...] = ()
    skipped: str | None = None

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.error is not None]

    @property
    def ok(self) -> bool:
        """A client that was not run, or that checked nothing, is not."""
        return bool(self.checks) and not self.failed

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "checks": [asdict(check) for check in self.checks]}


@dataclass(frozen=True)
class Places:
    """folder: of the environments. logs: of what they print."""

    folder: Path
    logs: Path
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def run_client(client: Client, target: Target, places: Places) -> Row:
    """Install the client if need be, and run its scripts against the server."""
    version = version_of(client)
    log = places.logs / f"{client.name}.txt"
    log.unlink(missing_ok=True)
    try:
        home = ensure(client, requirements(client), places.folder, log)
    except InstallError as error:
        return Row(client.name, client.title, version, skipped=str(error))
    # What an earlier run left behind is none of this one's.
    shutil.rmtree(home / "work", ignore_errors=True)
    started = time.perf_counter()
    checks: list[Check] = []
    for script in client.scripts:
        checks += run_script(client, script, target, home, places)
    seconds = round(time.perf_counter() - started, 1)
    return Row(client.name, client.title, version, seconds, tuple(checks))


def version_of(client: Client) -> str:
    if not client.package:
        return platform.python_version()
    return requirements(client)[client.package]


def run_script(
    client: Client, script: str, target: Target, home: Path, places: Places
) -> list[Check]:
    """What one script reports; that it ended badly is a failed check of its own."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    facts, report = work / "target.json", work / f"{script}.jsonl"
    facts.write_text(json.dumps({**asdict(target), "folder": str(work)}), encoding="utf-8")
    report.unlink(missing_ok=True)
    log = places.logs / f"{client.name}.txt"
    start = log.stat().st_size if log.exists() else 0
    started = time.perf_counter()
    code = _run(_command(client, script, home, facts, report), home, places, log)
    checks = read_report(report)
    if code != 0 or not checks:
        said = log.read_bytes()[start:].decode("utf-8", "replace").strip()[-LAST:]
        seconds = round(time.perf_counter() - started, 2)
        checks.append(Check(f"{script} runs to its end", seconds, f"exit code {code}: {said}"))
    return checks


def read_report(path: Path) -> list[Check]:
    """The checks in a report, as far as it was written."""
    if not path.exists():
        return []
    return [Check(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _command(
    client: Client, script: str, home: Path, facts: Path, report: Path
) -> list[str | Path]:
    if client.language == "python":
        return [python_of(home), "-P", "-c", BOOT, ROOT, script, facts, report]
    # Modules are found from where the script lies.
    for name in (script, "checks"):
        source = client.script(name)
        (home / source.name).write_bytes(source.read_bytes())
    return ["node", home / client.script(script).name, facts, report]


def _run(command: list[str | Path], home: Path, places: Places, log: Path) -> int:
    """The exit code; -9 for a script that had to be ended, with all that it started."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            cwd=home / "work",
            env=offline(places.environ, home),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            return process.wait(SCRIPT_SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return code
            raise
