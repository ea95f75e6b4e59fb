"""`python -m trtllm_lite.tools.compare_peers prepare | run | report`."""

import json
import signal
import sys
from pathlib import Path

import click

from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.tools.compare_peers.contenders import catalogue, chosen, parse_ours
from trtllm_lite.tools.compare_peers.document import document, dropped
from trtllm_lite.tools.compare_peers.prepare import environment_steps, model_steps, run_steps
from trtllm_lite.tools.compare_peers.prompts import read_texts
from trtllm_lite.tools.compare_peers.report import markdown
from trtllm_lite.tools.compare_peers.runner import Runner, RunOptions

PARTS = ("one", "many", "quality")

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
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Default: all.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--gate", type=click.FloatRange(0, 1), default=0.1, show_default=True)
@click.option("--retries", type=click.IntRange(0), default=2, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="A JSON file.")
def run(
    folder: Path,
    model: str,
    ours: tuple[str, ...],
    only: tuple[str, ...],
    parts: tuple[str, ...],
    threads: int,
    rounds: int,
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
    texts, wanted = read_texts(home / "texts.json"), parts or PARTS
    scores = "quality" in wanted and bool(texts.windows)
    options = RunOptions(
        threads=threads,
        rounds=rounds,
        gate=gate,
        retries=retries,
        logs=logs,
        reference=home / "reference.npy" if scores else None,
        **{name: () for name in ("one", "many") if name not in wanted},
    )
    findings = Runner(contenders, texts, options, click.echo).run()
    found = document(model, contenders, skipped, texts, options, findings)
    output.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    click.echo("{} of {} turns dropped".format(*dropped(found)))
    click.echo(markdown(found))


@cli.command()
@click.argument("documents", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def report(documents: tuple[Path, ...]) -> None:
    """Print recorded documents as Markdown."""
    for path in documents:
        click.echo(markdown(json.loads(path.read_text(encoding="utf-8"))))


def main() -> None:
    """One line for what a user can mend."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are ended
    try:
        cli(prog_name="python -m trtllm_lite.tools.compare_peers")
    except TrtllmLiteError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
