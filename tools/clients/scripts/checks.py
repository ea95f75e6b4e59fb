"""Runs the checks of one client inside the client's environment: standard library only.

Every public function that a script defines and that takes a `Target` is a check: it returns, or
raises what it found. A line of JSON is written for each.
"""

import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TextIO

PACKAGE = "trtllm_lite.tools.clients.scripts"
MAX_ERROR = 600


@dataclass(frozen=True)
class Target:
    """The server under test, as the runner started it.

    url: without a path. context: most tokens of prompt and answer together. folder: for files of
    the script's own. bundle: the folder that is served. reference: a JSON file with what the runner
    computed in process, for scripts that need it.
    """

    url: str
    key: str
    model: str
    context: int
    folder: str
    bundle: str
    reference: str

    @property
    def base(self) -> str:
        return f"{self.url}/v1"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


Check = Callable[[Target], None]


def main(script: str, target: str, report: str) -> None:
    """Run a script's checks; `target` and `report` are paths. Returns whatever they found."""
    facts = Target(**json.loads(Path(target).read_text(encoding="utf-8")))
    checks = checks_of(import_module(f"{PACKAGE}.{script}"))
    with Path(report).open("a", encoding="utf-8") as out:
        run_checks(checks, facts, out)


def checks_of(module: ModuleType) -> list[Check]:
    """The public functions of a script, in their order."""
    found = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and (value.__module__, value.__name__) == (module.__name__, name)
        and not name.startswith("_")
    ]
    return sorted(found, key=lambda function: function.__code__.co_firstlineno)


def run_checks(checks: list[Check], target: Target, out: TextIO) -> None:
    """One line for each check: its name, its seconds, and what was wrong, if anything was."""
    for check in checks:
        started = time.perf_counter()
        error = failure_of(check, target)
        line = {
            "check": check.__name__.replace("_", " "),
            "seconds": round(time.perf_counter() - started, 2),
            "error": error,
        }
        out.write(json.dumps(line) + "\n")
        out.flush()


def failure_of(check: Check, target: Target) -> str | None:
    """What the check raises, with the line of the script that raised it; None when it returns."""
    try:
        check(target)
    except Exception as error:
        return f"{_place(error, check)}{type(error).__name__}: {error}"[:MAX_ERROR]
    return None


def _place(error: Exception, check: Check) -> str:
    """The innermost line of the script's own in the traceback."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == check.__code__.co_filename:
            found = f"line {trace.tb_lineno}: "
        trace = trace.tb_next
    return found
