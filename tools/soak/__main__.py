"""`python -m trtllm_lite.tools.soak BUNDLE`: `make soak`."""

import asyncio
import json
import platform
import sys
import tempfile
from pathlib import Path

import click

from trtllm_lite import __version__
from trtllm_lite.tools.module_program import run_module
from trtllm_lite.tools.soak.run import Plan, soak
from trtllm_lite.tools.soak.verdict import document, lines


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--minutes", type=click.FloatRange(0.05), default=30.0, show_default=True)
@click.option("--workers", type=click.IntRange(1, 256), default=12, show_default=True)
@click.option("--short", type=click.IntRange(20), default=10_000, show_default=True)
@click.option("--schemas", type=click.IntRange(20), default=10_000, show_default=True)
@click.option("--cancels", type=click.IntRange(0), default=20, show_default=True)
@click.option("--cycles", type=click.IntRange(0), default=20, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="A JSON file for the figures.")
@click.option("--log", type=click.Path(path_type=Path), help="A file for the server's log.")
def cli(
    bundle: Path,
    minutes: float,
    workers: int,
    short: int,
    schemas: int,
    cancels: int,
    cycles: int,
    seed: int,
    output: Path | None,
    log: Path | None,
) -> None:
    """Serve BUNDLE, load it for a while with all that clients do, and say what did not hold.

    Exit code 1 when a bound is broken.
    """
    plan = Plan(minutes, workers, short, schemas, cancels, cycles, seed)
    with tempfile.TemporaryDirectory() as folder:
        log = log or Path(folder) / "server.log"
        found = asyncio.run(soak(bundle, plan, Path(folder), log, click.echo))
    machine = {"python": platform.python_version(), "trtllm_lite": __version__}
    made = document(found, {**machine, "system": platform.platform()})
    if output is not None:
        text = json.dumps(made, indent=1, allow_nan=False) + "\n"
        output.write_text(text, encoding="utf-8")
    for line in lines(made):
        click.echo(line)
    sys.exit(0 if made["holds"] else 1)


if __name__ == "__main__":
    run_module(cli, "trtllm_lite.tools.soak")
