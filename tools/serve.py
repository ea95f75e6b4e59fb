"""`trtllm-lite serve`: a bundle behind an OpenAI-compatible HTTP server."""

from pathlib import Path
from typing import Any

import click

from trtllm_lite.tools.command import console_of, option, subcommand
from trtllm_lite.tools.failures import needs_extra
from trtllm_lite.tools.options import (
    Count,
    Text,
    bundle_argument,
    length_option,
    prefix_option,
    seqs_option,
    speculation_options,
    speed_options,
    stacked,
)

GROUP = "Server"
MAX_KEY_FILE = 2**20
TOOL_FORMAT_NAMES = ("hermes", "llama3_json", "mistral", "mistral_args")

EXAMPLES = (
    "trtllm-lite serve smollm2",
    "trtllm-lite serve smollm2 --host 0.0.0.0 --api-key-file keys.txt",
    "trtllm-lite serve smollm2 --served-model-name chat --port 0 --log-format json",
)

server_options = stacked(
    option(GROUP, "--host", default="127.0.0.1", help="Address to listen on."),
    option(
        GROUP,
        "--port",
        type=click.IntRange(0, 65535),
        default=8000,
        help="Port to listen on; 0 takes any that is free.",
    ),
    option(
        GROUP,
        "--served-model-name",
        type=Text(),
        multiple=True,
        help="Name of the model for clients (repeatable: aliases). Default: the folder's name.",
    ),
    option(
        GROUP,
        "--api-key",
        type=Text(),
        multiple=True,
        show_default=False,
        help="Key that lets a client in (repeatable). Other users of this machine see options: "
        "prefer the file or the variable.",
    ),
    option(
        GROUP,
        "--api-key-file",
        type=click.Path(),
        help="File with one key a line; # begins a comment line.",
    ),
    option(
        GROUP,
        "--tool-call-parser",
        type=click.Choice(["auto", "none", *TOOL_FORMAT_NAMES]),
        default="auto",
        help="How the model writes tool calls. Auto: as its chat template shows.",
    ),
    option(
        GROUP,
        "--reasoning/--no-reasoning",
        default=None,
        help="Give what stands between <think> tags as reasoning_content. Default: where the chat "
        "template knows them.",
    ),
    option(
        GROUP,
        "--max-queue",
        type=Count(0),
        default=64,
        help="Sequences that may wait for a slot; more are answered 503.",
    ),
    option(GROUP, "--request-timeout", type=float, default=600.0, help="Seconds for one request."),
    option(
        GROUP,
        "--drain-timeout",
        type=float,
        default=30.0,
        help="Seconds for running requests after the signal to stop.",
    ),
    option(
        GROUP,
        "--step-timeout",
        type=float,
        default=120.0,
        help="Seconds for one step of the engine; a longer one ends the server with code 1.",
    ),
    option(
        GROUP,
        "--cors-origin",
        type=Text(),
        multiple=True,
        help="Origin whose pages may call the server (repeatable). Default: none.",
    ),
    option(
        GROUP,
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        help="Of the log on stderr; and of the line on stdout that says the server is ready.",
    ),
)


@subcommand("serve", examples=EXAMPLES)
@bundle_argument
@server_options
@seqs_option
@length_option
@speed_options
@prefix_option
@speculation_options
@click.pass_context
def serve(ctx: click.Context, /, bundle: str, **values: Any) -> None:
    """Serve a bundle over HTTP, as OpenAI's clients expect.

    One line on stdout tells when requests are taken. SIGTERM and Ctrl-C let running requests end;
    a second one aborts them.
    """
    values["api_key"] = (*values["api_key"], *keys_in(values.pop("api_key_file")))
    with needs_extra("serve"):
        from trtllm_lite.tools.serve_run import run_server
    ctx.exit(run_server(console_of(ctx), Path(bundle), values))


def keys_in(path: str | None) -> list[str]:
    """The API keys of a file. Raises click.UsageError for a file without any, OSError."""
    if path is None:
        return []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read(MAX_KEY_FILE).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise click.UsageError(f"--api-key-file: {path} holds no key")
    return keys
