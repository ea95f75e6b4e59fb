"""The `trtllm-lite` program: a group that imports a command's file when it is used.

Every command file imports only click and the standard library at its top, so `--help` is quick.
"""

import signal
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from trtllm_lite import __version__
from trtllm_lite.tools.command import ENV_PREFIX, HelpMixin, Run
from trtllm_lite.tools.console import error_line
from trtllm_lite.tools.failures import FAILED, describe, drop_output

PROG = "trtllm-lite"

# In the order of a first session; tools/NAME.py holds a click command called NAME.
COMMANDS = (
    *("export", "verify", "build", "inspect", "generate", "chat", "serve", "bench", "plan"),
    *("families", "doctor", "migrate"),
    "completion",
)

EXAMPLES = (
    "trtllm-lite export HuggingFaceTB/SmolLM2-135M-Instruct -o smollm2",
    "trtllm-lite chat smollm2",
    "trtllm-lite serve smollm2",
    "trtllm-lite bench smollm2 --concurrency 1,4",
)


class LazyGroup(HelpMixin, click.Group):
    """Finds commands by name in `trtllm_lite.tools`, and turns every error into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"trtllm_lite.tools.{cmd_name}"), cmd_name)
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            close = get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, report an error on one line, and exit with its code."""
        run = extra.setdefault("obj", Run())
        try:
            result = super().main(
                args,
                prog_name or PROG,
                complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            sys.stdout.flush()
        except BrokenPipeError:
            drop_output()
            sys.exit(FAILED)
        except (Exception, KeyboardInterrupt) as error:
            _report(error, run)
            sys.exit(describe(error).exit_code)
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result


def _report(error: BaseException, run: Run) -> None:
    if run.settings.debug and not isinstance(error, click.ClickException):
        traceback.print_exception(error)
    sys.stderr.write(error_line(run.settings, describe(error).message))


@click.group(
    cls=LazyGroup,
    name=PROG,
    examples=EXAMPLES,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "auto_envvar_prefix": ENV_PREFIX,
    },
)
@click.version_option(__version__, prog_name=PROG, message="%(prog)s %(version)s")
def cli() -> None:
    """Export decoder LLMs to verified prefill and decode ONNX graphs, and run them."""


def main() -> None:
    """Entry point of the `trtllm-lite` script."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character must not end the program.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # An exception, unlike the default, lets an export remove what it has half written.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cli.main()
