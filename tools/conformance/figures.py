"""What programs have in common that run one suite and record its figures."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(".conformance"),
    show_default=True,
    help="Where archives, environments and reports are.",
)
output_option = click.option(
    "--output", type=click.Path(path_type=Path), help="Write the figures here, as JSON."
)


def finish(figures: Mapping[str, Any], output: Path | None, *, passed: bool) -> NoReturn:
    """Print the figures, write them where they are wanted, and exit: 0 if all is as it must be."""
    text = json.dumps(figures, indent=1)
    click.echo(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    sys.exit(0 if passed else 1)
