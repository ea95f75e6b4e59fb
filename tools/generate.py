"""`trtllm-lite generate`: prompts in, text out."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from trtllm_lite.tools.command import argument, console_of, option, subcommand
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.failures import FAILED
from trtllm_lite.tools.metrics import request_line, total_line
from trtllm_lite.tools.options import (
    Count,
    bundle_argument,
    json_option,
    length_option,
    open_llm,
    prefix_option,
    seqs_option,
    show_tuning,
    speculation_options,
    speed_options,
)
from trtllm_lite.tools.sampling_options import choice_options, result_options, sampling_params

if TYPE_CHECKING:
    from trtllm_lite.runtime.llm import LLM
    from trtllm_lite.runtime.outputs import RequestOutput
    from trtllm_lite.runtime.sampling_params import SamplingParams

MAX_TOKENS = 256
EXAMPLES = (
    'trtllm-lite generate smollm2 "Once upon a time" --temperature 0',
    'trtllm-lite generate smollm2 --chat "Name three rivers." "And three lakes."',
    "trtllm-lite generate smollm2 --max-tokens 1k < story.txt",
    'trtllm-lite generate smollm2 "2+2=" --n 2 --logprobs 5 --json',
)


@subcommand("generate", examples=EXAMPLES)
@bundle_argument
@argument("prompts", "Texts to continue, together; none, or -, reads one from stdin.", nargs=-1)
@option("Prompt", "--chat", is_flag=True, help="Each prompt is a user message: apply the template.")
@option("Prompt", "--system", help="System message in front of each prompt; needs --chat.")
@option(
    "Sampling",
    "--max-tokens",
    type=Count(),
    help=f"Most new tokens. Default: {MAX_TOKENS}, or what the context holds.",
)
@choice_options
@result_options
@seqs_option
@length_option
@speed_options
@prefix_option
@speculation_options
@option(
    "Output",
    "--stream/--no-stream",
    default=None,
    help="Show text as it comes. Default: on a terminal, for one prompt and one choice.",
)
@json_option
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    bundle: str,
    prompts: tuple[str, ...],
    chat: bool,
    system: str | None,
    stream: bool | None,
    json: bool,
    **values: Any,
) -> None:
    """Continue one or more prompts, or answer them with --chat.

    Text goes to stdout, one line of figures to stderr.
    """
    console = console_of(ctx)
    _check_options(chat, system, json, stream, values)
    texts = _read_prompts(prompts)
    single = len(texts) == 1 and values["n"] in (None, 1)
    if stream and not single:
        raise click.UsageError("--stream shows one prompt with --n 1; leave it out")
    with open_llm(bundle, values) as llm:
        show_tuning(console, llm)
        inputs: list[Any] = [_messages(text, system) if chat else text for text in texts]
        if values["max_tokens"] is None:
            values["max_tokens"] = _default_max_tokens(llm, inputs)
        params = sampling_params(values, llm.default_params())
        if single and not json and (stream or (stream is None and console.out_is_terminal)):
            results = [_stream(console, llm, inputs[0], params)]
        else:
            results = llm.chat(inputs, params) if chat else llm.generate(inputs, params)
            _show(console, results, json)
    _finish(ctx, console, results)


def _check_options(
    chat: bool, system: str | None, json: bool, stream: bool | None, values: dict[str, Any]
) -> None:
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat: a plain prompt has no system message")
    if json and stream:
        raise click.UsageError("--stream and --json exclude each other: JSON is one document")
    for name in ("logprobs", "prompt_logprobs"):
        if values[name] is not None and not json:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --json to be shown")


def _read_prompts(prompts: tuple[str, ...]) -> list[str]:
    """The arguments, with `-` or nothing at all standing for stdin."""
    if prompts.count("-") > 1:
        raise click.UsageError("'-' stands for stdin, which can be read once only")
    if not prompts and sys.stdin.isatty():
        raise click.UsageError("no prompt: give one as an argument, or pipe it in")
    return [_utf8(_read_stdin() if p == "-" else p) for p in prompts or ("-",)]


def _read_stdin() -> str:
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not {error.encoding} text: {error.reason}") from error


def _utf8(prompt: str) -> str:
    """The prompt, unless it holds bytes of the command line that are no text."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise click.UsageError("a prompt is not UTF-8 text") from error
    return prompt


def _default_max_tokens(llm: "LLM", inputs: Sequence[Any]) -> int:
    """MAX_TOKENS, or what the context leaves beside the longest prompt. A prompt that leaves
    nothing gets MAX_TOKENS, so that its refusal tells the numbers."""
    room = llm.config.max_sequence_tokens - max(_length(llm, given) for given in inputs)
    return min(MAX_TOKENS, room) if room > 0 else MAX_TOKENS


def _length(llm: "LLM", given: Any) -> int:
    if isinstance(given, str):
        return len(llm.tokenizer.encode(given))
    text = llm.tokenizer.apply_chat_template(given)
    return len(llm.tokenizer.encode(text, add_special_tokens=False))


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _stream(console: Console, llm: "LLM", given: Any, params: "SamplingParams") -> "RequestOutput":
    """Show one answer as it grows; returns its last state."""
    source = {"prompt": given} if isinstance(given, str) else {"messages": given}
    with closing(llm.stream(params=params, **source)) as growing:
        for result in growing:
            console.stream(result.outputs[0].delta)
    console.stream("\n")
    return result


def _show(console: Console, results: list["RequestOutput"], json: bool) -> None:
    if json:
        console.json({"results": [asdict(result) for result in results]})
        return
    several = sum(len(result.outputs) for result in results) > 1
    for i, result in enumerate(results):
        for choice in result.outputs:
            if several:
                console.out(f"--- prompt {i + 1}, choice {choice.index + 1}")
            console.stream(choice.text + "\n")


def _finish(ctx: click.Context, console: Console, results: list["RequestOutput"]) -> None:
    line = request_line(results[0]) if len(results) == 1 else total_line(results)
    console.info(line, dim=True)
    failed = [choice for result in results for choice in result.outputs if choice.error]
    for choice in failed:
        console.error(str(choice.error))
    if failed:
        ctx.exit(FAILED)
