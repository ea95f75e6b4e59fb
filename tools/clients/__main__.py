"""`python -m trtllm_lite.tools.clients run | table`."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.clients.catalogue import CATALOGUE, Client, chosen
from trtllm_lite.tools.clients.document import document, markdown, server_row
from trtllm_lite.tools.clients.reference import write_reference
from trtllm_lite.tools.clients.runner import Places, Row, run_client
from trtllm_lite.tools.clients.scripts.checks import Target
from trtllm_lite.tools.clients.serving import MODEL, Ending, served
from trtllm_lite.tools.conformance.tool_template import with_tools
from trtllm_lite.tools.module_program import run_module

Tell = Callable[[str], None]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Real client libraries against a live server of ours, each in its own environment."""


@cli.command(epilog=f"Clients: {', '.join(client.name for client in CATALOGUE)}.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--bundle", type=click.Path(exists=True, path_type=Path), required=True, help="A chat model."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(".clients"),
    show_default=True,
    help="Where the environments are.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="A JSON file of all that was found."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Default: a free one.")
def run(names: tuple[str, ...], bundle: Path, folder: Path, output: Path | None, port: int) -> None:
    """Run the clients, all of them where none is named. The exit code is 1 when a check failed or a
    client could not be installed."""
    clients = chosen(names)
    folder = folder.resolve()
    if folder.is_file():
        raise UsageError(f"--folder: {folder} is a file")
    rows = run_all(clients, bundle.resolve(), folder, click.echo, port=port)
    found = document(rows, bundle)
    if output is not None:
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        output.write_text(text, encoding="utf-8")
    click.echo(markdown(found), nl=False)
    sys.exit(0 if all(row.ok for row in rows) else 1)


def run_all(
    clients: Sequence[Client],
    bundle: Path,
    folder: Path,
    tell: Tell,
    *,
    port: int = 0,
) -> list[Row]:
    """One row a client, and one of the server. Raises BundleError, ServeError."""
    logs, reference = folder / "log", folder / "reference.json"
    logs.mkdir(parents=True, exist_ok=True)
    if any("lm_eval_python" in client.scripts for client in clients):
        write_reference(bundle, reference)
    bundle = with_tools(bundle, folder, tell)
    places, ending, started = Places(folder, logs), Ending(), time.perf_counter()
    server_log = logs / "server.txt"
    rows = []
    with served(bundle, folder, server_log, ending, port) as server:
        target = Target(
            url=server.url,
            key=server.key,
            model=MODEL,
            context=server.context,
            folder=str(folder),
            bundle=str(bundle),
            reference=str(reference),
        )
        for client in clients:
            row = run_client(client, target, places)
            rows.append(row)
            tell_row(row, tell)
    log = server_log.read_text(encoding="utf-8", errors="replace")
    rows.append(server_row(ending.code, log, time.perf_counter() - started))
    tell_row(rows[-1], tell)
    return rows


def tell_row(row: Row, tell: Tell) -> None:
    """A line for the client, and one for everything that is wrong."""
    if row.skipped is not None:
        tell(f"{row.title} {row.version}: not run: {row.skipped}")
        return
    passed = len(row.checks) - len(row.failed)
    tell(f"{row.title} {row.version}: {passed} of {len(row.checks)} in {row.seconds:g} s")
    for check in row.failed:
        tell(f"  {check.check}: {check.error}")


@cli.command()
@click.argument("recorded", type=click.Path(exists=True, path_type=Path))
def table(recorded: Path) -> None:
    """Print a recorded run as a table."""
    click.echo(markdown(json.loads(recorded.read_text(encoding="utf-8"))), nl=False)


if __name__ == "__main__":
    run_module(cli, "trtllm_lite.tools.clients")
