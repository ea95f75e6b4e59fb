"""How developers' tools run as `python -m trtllm_lite.tools...` begin and end."""

import signal
import sys
from typing import NoReturn

import click

from trtllm_lite.runtime.errors import TrtllmLiteError


def run_module(command: click.Command, module: str) -> NoReturn:
    """Run the command that `module` is, and exit with its code: one line for what a user can mend.
    SIGTERM is an exception inside of it, so that what it has started is ended."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        command(prog_name=f"python -m {module}")
    except TrtllmLiteError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    sys.exit(0)
