"""`trtllm-lite migrate`: from the configuration of a TensorRT-LLM engine to commands."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtllm_lite.tools.command import argument, console_of, subcommand
from trtllm_lite.tools.console import Console, Table
from trtllm_lite.tools.options import json_option

if TYPE_CHECKING:
    from trtllm_lite.tools.migration.row import Recipe, Row

EXAMPLES = (
    "trtllm-lite migrate ./llama-engine",
    "trtllm-lite migrate ./llama-engine/config.json --json",
)
COLUMNS = ("old setting", "value", "here", "note")
OFF = "off, or what they are by default; --json names them"


@subcommand("migrate", examples=EXAMPLES)
@argument("engine", "Folder of a TensorRT-LLM engine, or its config.json.", type=click.Path())
@json_option
@click.pass_context
def migrate(ctx: click.Context, /, engine: str, json: bool) -> None:
    """Print the commands that make what a TensorRT-LLM engine was.

    Reads the config.json that trtllm-build 0.9 to 1.x wrote (or convert_checkpoint's), and says of
    every setting what stands for it here, or why nothing does. Reads no weights: engines hold
    none that could be taken back.
    """
    from trtllm_lite.tools.migration.old_config import read_old_config
    from trtllm_lite.tools.migration.recipe import make_recipe

    recipe = make_recipe(read_old_config(Path(engine)))
    console = console_of(ctx)
    if json:
        console.json(asdict(recipe))
    else:
        _show(console, recipe)


def _show(console: Console, recipe: "Recipe") -> None:
    for words in (recipe.export, recipe.build, recipe.serve):
        console.out(shlex.join(words))
    console.out("")
    made_by = f"TensorRT-LLM {recipe.version}" if recipe.version else "convert_checkpoint"
    rows = [_cells(row) for row in recipe.rows]
    rows.append(("all others", f"{len(recipe.unset)} settings", "nothing to set", OFF))
    console.table(Table(f"{recipe.architecture}, made by {made_by}", COLUMNS, tuple(rows)))
    console.info("CHECKPOINT is the folder or hub id that the weights came from.", dim=True)


def _cells(row: "Row") -> tuple[str, str, str, str]:
    here = row.new or {"automatic": "nothing to set"}.get(row.kind, row.kind)
    name = row.old
    if not name.endswith("*"):
        name = name.removeprefix("pretrained_config.").removeprefix("build_config.")
    return name, row.value, here, row.note
