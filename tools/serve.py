"""`trtllm-lite serve`: bundles behind an OpenAI-compatible HTTP server."""

from pathlib import Path
from typing import Any

import click

from trtllm_lite.tools.command import argument, console_of, option, subcommand
from trtllm_lite.tools.failures import needs_extra
from trtllm_lite.tools.options import (
    Count,
    Text,
    length_option,
    prefix_option,
    seqs_option,
    speculation_options,
    speed_options,
    stacked,
)
from trtllm_lite.tools.print_config import config_text

GROUP = "Server"
MAX_KEY_FILE = 2**20
TOOL_FORMAT_NAMES = ("hermes", "llama3_json", "mistral", "mistral_args")

EXAMPLES = (
    "trtllm-lite serve smollm2",
    "trtllm-lite serve smollm2 --host 0.0.0.0 --api-key-file keys.txt",
    "trtllm-lite serve smollm2 --served-model-name chat --port 0 --log-format json",
    "trtllm-lite serve small=smollm2 gemma3 --alias gpt-4o-mini=small",
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
        help="Name of the only bundle for clients (repeatable: aliases). Default: the folder's "
        "name.",
    ),
    option(
        GROUP,
        "--alias",
        type=Text(),
        multiple=True,
        help="ALIAS=NAME: one more name of a model (repeatable).",
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
        help="How the model writes tool calls, if its chat template takes tools. Auto: as the "
        "template shows.",
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
        help="Sequences that may wait for a slot of a model; more are answered 503.",
    ),
    option(
        GROUP,
        "--replicas",
        type=Text(),
        metavar="N|MIN-MAX",
        help="Processes that each hold the models, kept alive by Ray Serve (extra [ray]). MIN-MAX: "
        "as many as the load asks for. Default: none but this one.",
    ),
    option(
        GROUP,
        "--replica-routing",
        type=click.Choice(["least-loaded", "prefix"]),
        help="Which replica gets a request. Prefix: one that has had prompts which begin alike, "
        "unless it has much more to do. Default: the one with fewer requests.",
    ),
    option(GROUP, "--request-timeout", type=float, default=600.0, help="Seconds for one request."),
    option(
        GROUP,
        "--drain-timeout",
        type=float,
        default=30.0,
        help="Seconds for running requests after the signal to stop. What is left then is aborted, "
        "and the exit code is 1.",
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
        "--stream-keep-alive",
        type=float,
        default=15.0,
        help="Seconds of silence after which a stream gets a comment, so that nobody in between "
        "takes it for dead.",
    ),
    option(
        GROUP,
        "--metrics-alias",
        type=click.Choice(["vllm"]),
        help="Give /metrics under vLLM's names too, for dashboards that were made for it.",
    ),
    option(
        GROUP,
        "--otlp-endpoint",
        type=Text(),
        help="URL of an OpenTelemetry collector (OTLP over HTTP) that gets one span a request. "
        "Without prompts. Default: no tracing.",
    ),
    option(
        GROUP,
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        help="Of the log on stderr; and of the line on stdout that says the server is ready.",
    ),
    option(
        GROUP,
        "--print-config",
        is_flag=True,
        help="Print the value of every option and where it comes from, as a file for --config, and "
        "serve nothing.",
    ),
)

bundles_argument = argument(
    "bundle",
    "Folder made by `trtllm-lite export`, or NAME=FOLDER; several are served together.",
    type=click.Path(),
    nargs=-1,
    required=True,
)


@subcommand("serve", examples=EXAMPLES)
@bundles_argument
@server_options
@seqs_option
@length_option
@speed_options
@prefix_option
@speculation_options
@click.pass_context
def serve(ctx: click.Context, /, bundle: tuple[str, ...], **values: Any) -> None:
    """Serve bundles over HTTP, as OpenAI's clients expect.

    Requests pick one by its name, and get the first without one. One line on stdout tells when
    they are taken. SIGTERM and Ctrl-C let running requests end; a second one aborts them.
    """
    values["api_key"] = (*values["api_key"], *keys_in(values.pop("api_key_file")))
    with needs_extra("serve"):
        from trtllm_lite.tools import serve_run
    if values.pop("print_config"):
        serve_run.check_settings(bundle, values)
        console_of(ctx).stream(config_text(ctx, secret=("api_key",)))
        return
    if values["replicas"] is None:
        if values["replica_routing"] is not None:
            raise click.UsageError("--replica-routing is for several --replicas")
        ctx.exit(serve_run.run_server(console_of(ctx), bundle, values))
    from trtllm_lite.tools import serve_replicas

    ctx.exit(serve_replicas.run_replicas(console_of(ctx), bundle, values))


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
