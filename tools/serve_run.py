"""The run behind `trtllm-lite serve`: bind, load, announce, serve."""

import asyncio
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trtllm_lite import __version__
from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.runtime.host import available_memory
from trtllm_lite.runtime.host_tuning import in_words
from trtllm_lite.runtime.loading import LoadOptions, Parts, load
from trtllm_lite.runtime.manifest import MANIFEST_NAME, PARITY_NAME, Manifest
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.runtime.server.lifecycle import Loader, LoadProgress, Server
from trtllm_lite.runtime.server.listening import bind, url_of
from trtllm_lite.runtime.server.logs import configure_logging
from trtllm_lite.runtime.server.open_files import connections_within, raise_limit
from trtllm_lite.runtime.server.parsers.formats import (
    ToolFormat,
    detect_reasoning,
    detect_tool_format,
    tool_format,
)
from trtllm_lite.runtime.server.replicas.scale import parse_scale
from trtllm_lite.runtime.server.service import ModelCard, Service
from trtllm_lite.runtime.server.settings import ServerConfig, key_digest
from trtllm_lite.runtime.server.tracing import NoTracer, Tracer, open_tracer
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.options import load_arguments
from trtllm_lite.tools.progress import progress_shown
from trtllm_lite.tools.serve_models import Wanted, shared_options, wanted_models
from trtllm_lite.tools.serve_says import banner, reader_may_leave, ready_line, warn_of_settings

MAX_PARITY = 2**20
MAX_TEMPLATE = 2**20


def run_server(console: Console, bundles: Sequence[str], values: dict[str, Any]) -> int:
    """Serve until told to stop; returns the exit code. `bundles`: FOLDER or NAME=FOLDER each.
    Raises TrtllmLiteError: the port, a bundle, or an engine that has died."""
    started = time.monotonic()
    config = within_open_files(server_config(values))
    configure_logging(values["log_format"])
    models = wanted_models(bundles, values["served_model_name"], values["alias"])
    reads = Reads(values["tool_call_parser"], values["reasoning"])
    options = LoadOptions(**load_arguments(values), isolate_templates=True)
    with closing(bind(config.host, config.port)) as sock, closing(_tracer(values)) as tracer:
        url = url_of(sock)
        with reader_may_leave(sys.stderr):
            warn_of_settings(console, config)
            folders = ", ".join(str(model.bundle) for model in models)
            console.info(f"listening on {url}; loading {folders}", dim=True)

        def announce(service: Service) -> None:
            with reader_may_leave(sys.stderr):
                for line in banner(service, url, time.monotonic() - started):
                    console.info(line, dim=True)
            with reader_may_leave(sys.stdout):
                console.stream(ready_line(service, url, values["log_format"]) + "\n")

        options = shared_options(options, models, available_memory())
        loads = [opener(console, model, options, reads) for model in models]
        if len(loads) > 1:
            loads = [about(model, each) for model, each in zip(models, loads, strict=True)]
        server = Server(config, loads[0], announce, __version__, tracer, loads[1:])
        return until_told(console, server, sock)


def within_open_files(config: ServerConfig) -> ServerConfig:
    """With as many connections as this process may have open files for. Raises UsageError."""
    most = connections_within(raise_limit(), config.limits.connections)
    return replace(config, limits=replace(config.limits, connections=most))


def check_settings(bundles: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raises what would keep a server with these settings from starting, as far as it can be told
    before it loads."""
    server_config(values)
    wanted_models(bundles, values["served_model_name"], values["alias"])
    if values["replicas"] is not None:
        parse_scale(values["replicas"])


class Runnable(Protocol):
    """A server, as far as its run goes; see `Server`."""

    @property
    def left_behind(self) -> bool:
        """Whether the program should end at once after the run."""

    async def run(self, sock: socket.socket) -> int:
        """The exit code."""


def until_told(console: Console, server: Runnable, sock: socket.socket) -> int:
    """The exit code of a server that has run to its end. Raises TrtllmLiteError."""
    runner = asyncio.Runner()
    try:
        code = runner.run(server.run(sock))
    except TrtllmLiteError as error:
        if not server.left_behind:
            runner.close()
            raise
        console.error(str(error))
        code = error.exit_code
    if server.left_behind:
        # A thread that cannot be interrupted would hold up the end of the interpreter.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    runner.close()
    return code


class Both:
    """Reports to two listeners."""

    def __init__(self, first: Progress, second: Progress) -> None:
        self._both = (first, second)

    def step(self, name: str) -> None:
        for each in self._both:
            each.step(name)

    def advance(self, done: int, total: int, unit: str) -> None:
        for each in self._both:
            each.advance(done, total, unit)

    def note(self, text: str) -> None:
        for each in self._both:
            each.note(text)


def _tracer(values: Mapping[str, Any]) -> Tracer:
    endpoint = values["otlp_endpoint"]
    return NoTracer() if endpoint is None else open_tracer(endpoint)


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """The server's half of the options. Raises UsageError."""
    return ServerConfig(
        host=values["host"],
        port=values["port"],
        key_digests=tuple(dict.fromkeys(map(key_digest, values["api_key"]))),
        max_queue=values["max_queue"],
        request_timeout=values["request_timeout"],
        drain_timeout=values["drain_timeout"],
        step_timeout=values["step_timeout"],
        cors_origins=tuple(values["cors_origin"]),
        keep_alive_seconds=values["stream_keep_alive"],
        metrics_alias=values["metrics_alias"],
    )


@dataclass(frozen=True)
class Reads:
    """How answers are read: `tools` is a format's name, "none" or "auto"; None is auto too."""

    tools: str = "auto"
    reasoning: bool | None = None

    def tool_format(self, template: str) -> ToolFormat | None:
        """For a model with this chat template (Jinja source)."""
        if self.tools == "none":
            return None
        return detect_tool_format(template) if self.tools == "auto" else tool_format(self.tools)

    def has_reasoning(self, template: str) -> bool:
        """For a model with this chat template."""
        return detect_reasoning(template) if self.reasoning is None else self.reasoning


def model_card(
    bundle: Path, names: tuple[str, ...], config: EngineConfig, reads: Reads
) -> ModelCard:
    """What clients are told about the bundle, which has been opened before. Raises BundleError."""
    manifest = read_manifest(bundle)
    template = _template(bundle, manifest)
    path = bundle / MANIFEST_NAME
    content = path.read_bytes() + repr(config).encode()
    digest = hashlib.sha256(content).hexdigest()[:8]
    return ModelCard(
        names=names,
        created=int(path.stat().st_mtime),
        fingerprint=f"trtllm-lite-{__version__}-{digest}",
        facts=bundle_facts(manifest, parity(bundle, manifest)),
        tool_format=reads.tool_format(template),
        reasoning=reads.has_reasoning(template),
    )


def bundle_facts(manifest: Manifest, certificate: object) -> dict[str, Any]:
    """For people and dashboards: where the model came from, how it is stored, what was proved."""
    quantization = manifest.quantization
    return {
        "source": manifest.source.id,
        "license": manifest.source.license,
        "model_type": manifest.model.model_type,
        "num_parameters": manifest.model.num_parameters,
        "target": manifest.target,
        "dtype": manifest.dtype,
        "quantization": {"prefill": quantization.prefill, "decode": quantization.decode},
        "parity": certificate,
    }


def parity(bundle: Path, manifest: Manifest) -> dict[str, Any] | None:
    """The verdict and the gates of the certificate; None for a bundle without a readable one."""
    if not any(entry.path == PARITY_NAME for entry in manifest.files):
        return None
    try:
        with (bundle / PARITY_NAME).open("rb") as file:
            document = json.loads(file.read(MAX_PARITY))
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict):
        return None
    return {"passed": document.get("passed") is True, "gates": document.get("gates", [])}


def _template(bundle: Path, manifest: Manifest) -> str:
    """The chat template's source; empty where there is none."""
    if manifest.chat_template is None:
        return ""
    with (bundle / manifest.chat_template).open(encoding="utf-8") as file:
        return file.read(MAX_TEMPLATE)


def show_settings(console: Console, parts: Parts) -> None:
    """Which settings this machine gets."""
    if parts.tuning is not None:
        console.info(f"settings for this machine: {in_words(parts.tuning)}", dim=True)


def opener(console: Console, model: Wanted, options: LoadOptions, reads: Reads) -> Loader:
    """What opens a model; its errors name the bundle."""

    def opened(heard: LoadProgress) -> tuple[AsyncLLM, ModelCard]:
        with progress_shown(console.settings) as shown:
            parts = load(model.bundle, options, Both(heard, shown))
        show_settings(console, parts)
        card = model_card(model.bundle, model.names, parts.config, reads)
        return AsyncLLM.from_parts(parts), card

    return opened


def about(model: Wanted, load_it: Loader) -> Loader:
    """The same, with errors that say which of several models they are about."""

    def opened(heard: LoadProgress) -> tuple[AsyncLLM, ModelCard]:
        try:
            return load_it(heard)
        except UsageError as error:
            raise UsageError(f"model {model.names[0]}: {error}") from error
        except TrtllmLiteError as error:
            raise TrtllmLiteError(f"model {model.names[0]}: {error}") from error

    return opened
