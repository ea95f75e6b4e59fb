"""`trtllm-lite chat`: a conversation with a bundle, on a terminal or through a pipe."""

import sys
from typing import Any

import click

from trtllm_lite.tools.chat_repl import Reader, Repl
from trtllm_lite.tools.chat_session import Conversation
from trtllm_lite.tools.command import console_of, option, subcommand
from trtllm_lite.tools.failures import FAILED
from trtllm_lite.tools.options import (
    Count,
    bundle_argument,
    length_option,
    open_llm,
    prefix_option,
    speculation_options,
    speed_options,
)
from trtllm_lite.tools.sampling_options import choice_options, sampling_params

EXAMPLES = (
    "trtllm-lite chat smollm2",
    'trtllm-lite chat smollm2 --system "Answer in one sentence." --temperature 0',
    "trtllm-lite chat smollm2 < questions.txt > answers.txt   # one turn a line",
)


@subcommand("chat", examples=EXAMPLES)
@bundle_argument
@option("Prompt", "--system", help="System message of the conversation.")
@option(
    "Sampling",
    "--max-tokens",
    type=Count(),
    help="Most tokens of an answer. Default: what the context holds.",
)
@choice_options
@length_option
@speed_options
@prefix_option
@speculation_options
@click.pass_context
def chat(ctx: click.Context, /, bundle: str, system: str | None, **values: Any) -> None:
    """Chat with a bundle.

    /help lists the commands inside. Ctrl-C stops an answer; Ctrl-D leaves.
    """
    console = console_of(ctx)
    with open_llm(bundle, values, max_num_seqs=1) as llm:
        if not llm.tokenizer.has_chat_template:
            raise click.UsageError(f"{bundle} has no chat template; use generate")
        max_tokens = values["max_tokens"]
        params = sampling_params(values, llm.default_params())
        conversation = Conversation(llm, _unlimited(params, max_tokens), system)
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if not Repl(console, conversation, Reader(terminal)).run():
            ctx.exit(FAILED)


def _unlimited(params: Any, max_tokens: int | None) -> Any:
    """An answer ends where the model ends it, unless the user set a limit."""
    from dataclasses import replace

    return params if max_tokens is not None else replace(params, max_tokens=None)
