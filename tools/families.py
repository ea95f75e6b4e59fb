"""`trtllm-lite families`: which model families are proved, generic or refused."""

import click

from trtllm_lite.tools.command import console_of, subcommand
from trtllm_lite.tools.console import Table
from trtllm_lite.tools.failures import needs_extra
from trtllm_lite.tools.options import json_option

COLUMNS = ("model_type", "name", "status", "note")
STATUS_HELP = (
    "proved: a small model of the family is tested against transformers",
    "generic: the same path without a test of its own; the certificate decides",
    "refused: known not to work, with the reason",
)


@subcommand("families", examples=("trtllm-lite families", "trtllm-lite families --json"))
@json_option
@click.pass_context
def families(ctx: click.Context, /, json: bool) -> None:
    """List model families: proved, generic or refused."""
    with needs_extra("export"):
        from trtllm_lite.exporter.families import families as known_families
    rows = tuple((f.model_type, f.name, f.status, f.note) for f in known_families())
    console = console_of(ctx)
    if json:
        console.json([dict(zip(COLUMNS, row, strict=True)) for row in rows])
        return
    console.table(Table("Families", COLUMNS, rows))
    for line in STATUS_HELP:
        console.info(line, dim=True)
