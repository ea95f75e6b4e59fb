"""`python -m trtllm_lite.tools.compare_peers prepare | run | report`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.compare_peers.contenders import catalogue, chosen, parse_ours
from trtllm_lite.tools.compare_peers.document import document, dropped
from trtllm_lite.tools.compare_peers.page import Notes, page, read_notes, without_reason
from trtllm_lite.tools.compare_peers.prepare import environment_steps, model_steps, run_steps
from trtllm_lite.tools.compare_peers.prompts import read_texts
from trtllm_lite.tools.compare_peers.report import markdown
from trtllm_lite.tools.compare_peers.runner import Runner, RunOptions
from trtllm_lite.tools.compare_peers.turns import MANY, ONE, PARTS, Part
from trtllm_lite.tools.module_program import run_module

QUALITY = "quality"
DEFAULT_PARTS = (ONE.name, MANY.name, QUALITY)

folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(".peers"),
    show_default=True,
    help="Where environments and models are.",
)
model_option = click.option("--model", default="smollm2", show_default=True, help="Its folder.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Compare trtllm-lite with other runtimes, side by side on this machine."""


@cli.command()
@folder_option
@model_option
@click.option("--keep-going", is_flag=True, help="Go on after a step that failed.")
def prepare(folder: Path, model: str, keep_going: bool) -> None:
    """Install the peers and convert the model. What is there is not done again.

    The model is FOLDER/models/MODEL/source.gguf, or for a random one a folder hf/ there that
    tools/make_checkpoint.py made, with the tokenizer files of any model beside it: the exporters
    want some, nothing is tokenized.
    """
    folder = folder.resolve()
    home, logs = folder / "models" / model, folder / "log"
    if not (home / "source.gguf").exists() and not (home / "hf").exists():
        raise UsageError(f"no {home}/source.gguf and no {home}/hf; put the model there")
    logs.mkdir(exist_ok=True)
    steps = [*environment_steps(folder), *model_steps(folder, model)]
    failed = run_steps(steps, logs, click.echo, keep_going=keep_going)
    for line in failed:
        click.echo(line, err=True)
    sys.exit(1 if failed else 0)


@cli.command()
@folder_option
@model_option
@click.option(
    "--ours", multiple=True, metavar="NAME:BITS[:ort]=BUNDLE", help="May be given repeatedly."
)
@click.option("--only", multiple=True, help="Contenders whose name holds this; repeatable.")
@click.option(
    "--part",
    "chosen_parts",
    multiple=True,
    type=click.Choice((*PARTS, QUALITY)),
    default=DEFAULT_PARTS,
    show_default=True,
)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), help="Default: 2, and 1 of long prompts.")
@click.option("--gate", type=click.FloatRange(0, 1), default=0.1, show_default=True)
@click.option("--retries", type=click.IntRange(0), default=2, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="A JSON file.")
def run(
    folder: Path,
    model: str,
    ours: tuple[str, ...],
    only: tuple[str, ...],
    chosen_parts: tuple[str, ...],
    threads: int,
    rounds: int | None,
    gate: float,
    retries: int,
    output: Path,
) -> None:
    """Measure, write the JSON document and print its tables."""
    folder = folder.resolve()
    home, logs = folder / "models" / model, folder / "log"
    if not (home / "texts.json").exists():
        raise UsageError(f"no {home}/texts.json; run prepare first")
    logs.mkdir(exist_ok=True)
    try:
        bundles = [parse_ours(text) for text in ours]
    except ValueError as error:
        raise UsageError(f"--ours: {error}") from error
    peers, skipped = catalogue(folder, model)
    contenders = chosen([*bundles, *peers], only)
    for line in skipped:
        click.echo(line)
    texts = read_texts(home / "texts.json")
    scores = QUALITY in chosen_parts and bool(texts.windows)
    options = RunOptions(
        threads=threads,
        gate=gate,
        retries=retries,
        logs=logs,
        reference=home / "reference.npy" if scores else None,
        parts=parts_named(chosen_parts, rounds),
    )
    findings = Runner(contenders, texts, options, click.echo).run()
    found = document(model, contenders, skipped, texts, options, findings)
    output.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    click.echo("{} of {} turns dropped".format(*dropped(found)))
    click.echo(markdown(found))


def parts_named(names: Sequence[str], rounds: int | None) -> tuple[Part, ...]:
    """In the order of `PARTS`, with as many rounds as are asked for, else as each part has."""
    parts = [part for name, part in PARTS.items() if name in names]
    return tuple(part if rounds is None else replace(part, rounds=rounds) for part in parts)


@cli.command()
@click.argument("documents", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--notes", type=click.Path(exists=True, path_type=Path), help="Titles and reasons.")
@click.option("--output", type=click.Path(path_type=Path), help="Default: print it.")
def report(documents: tuple[Path, ...], notes: Path | None, output: Path | None) -> None:
    """Make one page of recorded documents. Cells that are behind without a reason are said."""
    found = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in documents}
    written = Notes({}, {}) if notes is None else read_notes(notes)
    text = page(found, written)
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
    for line in without_reason(found, written):
        click.echo(f"no reason: {line}", err=True)


if __name__ == "__main__":
    run_module(cli, "trtllm_lite.tools.compare_peers")
