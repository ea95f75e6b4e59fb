"""`python -m trtllm_lite.tools.conformance.schemathesis_run`: Schemathesis (MIT) makes requests of
/openapi.json, valid and invalid ones, and holds the answers against it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from trtllm_lite.tools.compare_peers.prepare import Step, run_steps
from trtllm_lite.tools.conformance.figures import finish, folder_option, output_option
from trtllm_lite.tools.conformance.judge import ConformanceError
from trtllm_lite.tools.conformance.toy import toy_server
from trtllm_lite.tools.module_program import run_module

VERSION = "4.32.5"
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
PHASES = "examples,coverage,fuzzing"
# Ours is in its place: accepted, or refused for what no document can tell.
LEFT_OUT = "positive_data_acceptance"
REQUEST_SECONDS = 60
KEY = "toy"
"""Of the server that is started here, so that it is tried without one too."""
FINISHED = (0, 1)  # its codes: all passed, something failed


def environment(folder: Path, tell: Any) -> Path:
    """The program, installed below `folder`. Raises PrepareError."""
    home = folder / "env-schemathesis"
    python = home / "bin" / "python"
    create = (sys.executable, "-m", "venv", str(home))
    install = (str(python), "-m", "pip", "install", "--quiet", f"schemathesis=={VERSION}")
    steps = [
        Step("environment of schemathesis", python, create),
        Step("packages of schemathesis", home / f".installed-{VERSION}", install),
    ]
    logs = folder / "log"
    logs.mkdir(parents=True, exist_ok=True)
    run_steps(steps, logs, tell, keep_going=False)
    return home / "bin" / "st"


def run(program: Path, url: str, folder: Path, options: Sequence[str] = ()) -> dict[str, Any]:
    """Its report on the server at `url`. `options`: further ones of its own. Raises
    ConformanceError when it does not come to its end."""
    work = folder / "schemathesis"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copy2(HOOKS, work)
    report = work / "report.json"
    command = [
        *(str(program), "run", f"{url}/openapi.json", "--phases", PHASES, "--mode", "all"),
        *("--exclude-checks", LEFT_OUT, "--warnings", "off", "--no-color"),
        *("--continue-on-failure", "--request-timeout", str(REQUEST_SECONDS)),
        *("--generation-database", "none", "--report-json-path", str(report)),
        *options,
    ]
    done = subprocess.run(command, cwd=work, env=_variables(work))
    if done.returncode not in FINISHED or not report.is_file():
        raise ConformanceError(f"schemathesis ended with code {done.returncode}")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def _variables(work: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return kept | local | {"SCHEMATHESIS_HOOKS": HOOKS.stem, "PYTHONPATH": str(work)}


def document(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded of a run. Raises ConformanceError for a report of another form."""
    try:
        operations, cases = report["operations"], report["test_cases"]
        return {
            "suite": f"schemathesis {report['schemathesis_version']}",
            "seed": report["seed"],
            "operations": operations["tested"],
            "phases": {name: each["status"] for name, each in report["phases"].items()},
            "requests": cases["generated"],
            "failures": cases["unique_failures"],
            "errors": operations["errored"] + cases["errored"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ConformanceError(f"the report has no {error}") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@folder_option
@click.option("--url", help="A running server without a key. Default: one with a toy model.")
@click.option("--examples", type=int, default=50, show_default=True, help="Of fuzzing, by route.")
@click.option("--seed", type=int, help="Makes the same requests again.")
@output_option
def cli(
    folder: Path, url: str | None, examples: int, seed: int | None, output: Path | None
) -> None:
    """Run Schemathesis. Exits with 1 when it finds something."""
    place = folder.resolve()
    program = environment(place, click.echo)
    options = ["--max-examples", str(examples), *(() if seed is None else ("--seed", str(seed)))]
    if url is None:
        options += ["--header", f"Authorization: Bearer {KEY}"]
    with toy_server(KEY) if url is None else nullcontext(url) as where:
        made = document(run(program, where.rstrip("/"), place, options))
    finish(made, output, passed=not (made["failures"] or made["errors"]))


if __name__ == "__main__":
    run_module(cli, "trtllm_lite.tools.conformance.schemathesis_run")
