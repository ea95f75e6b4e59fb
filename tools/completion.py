"""`trtllm-lite completion SHELL`: the script that makes a shell complete commands and options."""

import click
from click.shell_completion import get_completion_class

from trtllm_lite.tools.command import argument, console_of, subcommand


@subcommand(
    "completion",
    examples=(
        'eval "$(trtllm-lite completion bash)"                  # in ~/.bashrc',
        'eval "$(trtllm-lite completion zsh)"                   # in ~/.zshrc',
        "trtllm-lite completion fish > ~/.config/fish/completions/trtllm-lite.fish",
    ),
)
@argument("shell", "Which shell.", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> None:
    """Print the completion script for a shell."""
    root = ctx.find_root()
    name = str(root.info_name)
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"this click has no completion for {shell}")
    console_of(ctx).out(kind(root.command, {}, name, variable).source().strip())
