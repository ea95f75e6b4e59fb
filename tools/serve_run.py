"""The run behind `trtllm-lite serve`: bind, load, announce, serve."""

import asyncio
import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lite import __version__
from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.runtime.host_tuning import in_words
from trtllm_lite.runtime.loading import LoadOptions, Parts, load
from trtllm_lite.runtime.manifest import MANIFEST_NAME, PARITY_NAME, Manifest
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.runtime.progress import Progress
from trtllm_lite.runtime.server.lifecycle import Server
from trtllm_lite.runtime.server.listening import bind, url_of
from trtllm_lite.runtime.server.logs import configure_logging
from trtllm_lite.runtime.server.parsers.formats import (
    ToolFormat,
    detect_reasoning,
    detect_tool_format,
    tool_format,
)
from trtllm_lite.runtime.server.service import ModelCard, Service
from trtllm_lite.runtime.server.settings import ServerConfig, key_digest
from trtllm_lite.tools.console import Console
from trtllm_lite.tools.options import load_arguments
from trtllm_lite.tools.progress import progress_shown

MAX_PARITY = 2**20
MAX_TEMPLATE = 2**20
_LOCAL = ("127.", "::1", "localhost")


def run_server(console: Console, bundle: Path, values: dict[str, Any]) -> int:
    """Serve until told to stop; returns the exit code. Raises TrtllmLiteError: the port, the
    bundle, or an engine that has died."""
    config = server_config(values)
    configure_logging(values["log_format"])
    names = values["served_model_name"] or (default_name(bundle),)
    reads = Reads(values["tool_call_parser"], values["reasoning"])
    options = LoadOptions(**load_arguments(values))
    with closing(bind(config.host, config.port)) as sock:
        url = url_of(sock)
        warn_if_open(console, config)
        console.info(f"listening on {url}; loading {bundle}", dim=True)

        def opened(heard: Progress) -> tuple[AsyncLLM, ModelCard]:
            with progress_shown(console.settings) as shown:
                parts = load(bundle, options, Both(heard, shown))
            show_settings(console, parts)
            card = model_card(bundle, names, parts.config, reads)
            return AsyncLLM.from_parts(parts), card

        def announce(service: Service) -> None:
            for line in banner(service, url):
                console.info(line, dim=True)
            console.stream(ready_line(service, url, values["log_format"]) + "\n")

        return _until_told(console, Server(config, opened, announce, __version__), sock)


def _until_told(console: Console, server: Server, sock: socket.socket) -> int:
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
    )


def default_name(bundle: Path) -> str:
    """The folder's name, with what no model name may hold replaced."""
    return re.sub(r"[^\w.+@-]+", "-", bundle.resolve().name, flags=re.ASCII) or "model"


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


def warn_if_open(console: Console, config: ServerConfig) -> None:
    """A server that others can reach, and that asks nobody for a key."""
    if not config.key_digests and not config.host.startswith(_LOCAL):
        console.warn(f"anybody who reaches {config.host} may use the server: set --api-key-file")


def banner(service: Service, url: str) -> list[str]:
    """What an operator wants to see once."""
    served, config = service.models[0], service.config
    engine, keys = served.llm.config, len(config.key_digests)
    return [
        f"model {', '.join(m.name for m in service.models)} ({served.card.facts.get('source')})",
        f"{engine.max_num_seqs} slots, {engine.max_model_len} tokens each, "
        f"{engine.max_kv_tokens} KV tokens in all; {config.max_queue} may wait",
        f"API keys: {keys or 'none, everybody is let in'}",
        f"page {url}/   API {url}/v1   metrics {url}/metrics",
    ]


def ready_line(service: Service, url: str, form: str) -> str:
    """One line for programs that wait for the server."""
    model = service.models[0].name
    if form == "json":
        return json.dumps({"event": "ready", "url": url, "model": model, "pid": os.getpid()})
    return f"ready url={url} model={model} pid={os.getpid()}"
