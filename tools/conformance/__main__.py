"""`python -m trtllm_lite.tools.conformance [SUITE...] --bundle BUNDLE`."""

import sys
from pathlib import Path

import click

from trtllm_lite.tools.conformance.document import (
    document,
    read_beside,
    read_documents,
    write_document,
)
from trtllm_lite.tools.conformance.expected import read_expected
from trtllm_lite.tools.conformance.figures import folder_option
from trtllm_lite.tools.conformance.judge import counts, judge
from trtllm_lite.tools.conformance.page import page
from trtllm_lite.tools.conformance.run import ROOT, Place, run_suite
from trtllm_lite.tools.conformance.suites import SUITES, Suite
from trtllm_lite.tools.conformance.tool_template import with_tools
from trtllm_lite.tools.module_program import run_module

MEASUREMENTS = ROOT / "docs" / "measurements"
PAGE = ROOT / "docs" / "conformance.md"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="[SUITE]...", nargs=-1, type=click.Choice(tuple(SUITES)))
@click.option("--bundle", type=click.Path(exists=True, path_type=Path), help="The bundle to serve.")
@folder_option
@click.option("--record/--no-record", default=True, help="Write down what came out as expected.")
@click.option("--page-only", is_flag=True, help="Run nothing, write the page of what is recorded.")
def cli(
    names: tuple[str, ...], bundle: Path | None, folder: Path, record: bool, page_only: bool
) -> None:
    """Run the suites of other projects against a server with BUNDLE; all of them by default.

    Exits with 1 when a test fails that is not on the suite's list, and when one on it passes.
    """
    if page_only:
        write_page()
        return
    if bundle is None:
        raise click.UsageError("--bundle is missing: give the bundle to serve")
    place = Place(folder.resolve())
    place.folder.mkdir(parents=True, exist_ok=True)
    bundle = with_tools(bundle, place.folder, click.echo)
    chosen = [SUITES[name] for name in names] or list(SUITES.values())
    as_expected = [_run(suite, place, bundle, record) for suite in chosen]
    if record:
        write_page()
    sys.exit(0 if all(as_expected) else 1)


def _run(suite: Suite, place: Place, bundle: Path, record: bool) -> bool:
    """True if all came out as expected."""
    expected = read_expected(suite.expected)
    results = run_suite(suite, place, bundle, click.echo)
    verdict = judge(results, expected)
    for line in verdict.lines():
        click.echo(line, err=True)
    totals = ", ".join(f"{count} {outcome}" for outcome, count in counts(results).items())
    click.echo(f"{suite.name}: {totals}")
    if record and verdict.clean:
        found = document(suite, results, expected, bundle)
        click.echo(f"wrote {write_document(found, MEASUREMENTS)}")
    return verdict.clean


def write_page() -> None:
    """From what is recorded."""
    PAGE.write_text(page(read_documents(MEASUREMENTS), read_beside(MEASUREMENTS)), encoding="utf-8")


if __name__ == "__main__":
    run_module(cli, "trtllm_lite.tools.conformance")
