"""What `trtllm-lite serve` tells its operator: on stderr for people, and one line on stdout for
programs that wait for it."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from trtllm_lite.runtime.server.service import Served, Service
from trtllm_lite.runtime.server.settings import ServerConfig
from trtllm_lite.tools.console import Console, format_bytes
from trtllm_lite.tools.failures import drop_output

FEW_CONNECTIONS = 512
_LOCAL = ("127.", "::1", "localhost")


def warn_of_settings(console: Console, config: ServerConfig) -> None:
    """What is allowed and seldom meant."""
    if not config.key_digests and not config.host.startswith(_LOCAL):
        console.warn(f"anybody who reaches {config.host} may use the server: set --api-key-file")
    if "*" in config.cors_origins and not config.key_digests:
        console.warn("any page that this machine's browsers open may use the server")
    most = config.limits.connections
    if most < FEW_CONNECTIONS:
        console.warn(f"at most {most} connections at the same time: raise ulimit -n for more")


def banner(service: Service, url: str, seconds: float) -> list[str]:
    """What an operator wants to see once. `seconds`: from the start to here."""
    config, keys = service.config, len(service.config.key_digests)
    limits = config.limits
    models = [line for served in service.engines for line in _model(service, served)]
    return [
        *models,
        f"limits: {config.max_queue} sequences may wait, {config.request_timeout:g} s a request, "
        f"{format_bytes(limits.body_bytes)} a body, {limits.connections} connections",
        f"API keys: {keys or 'none, everybody is let in'}",
        f"page {url}/   API {url}/v1   its description {url}/docs   metrics {url}/metrics",
        f"ready after {seconds:.1f} s; Ctrl-C stops it",
    ]


def ready_line(service: Service, url: str, form: str) -> str:
    """One line for programs that wait for the server. `form`: "text" or "json"."""
    return ready_line_of([served.name for served in service.models], url, form)


def ready_line_of(names: Sequence[str], url: str, form: str) -> str:
    """The same for these names."""
    if form == "json":
        facts = {"url": url, "model": names[0], "models": names, "pid": os.getpid()}
        return json.dumps({"event": "ready", **facts})
    return f"ready url={url} model={names[0]} pid={os.getpid()}"


@contextmanager
def reader_may_leave(stream: TextIO) -> Iterator[None]:
    """A server goes on when nobody reads what it says any more, as behind `| head`: from then on
    `stream` leads nowhere."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        drop_output(stream)


def _model(service: Service, served: Served) -> Sequence[str]:
    engine, facts = served.llm.config, served.card.facts
    names = ", ".join(each.name for each in service.models if each.card is served.card)
    return (
        f"model {names} ({facts.get('source')}){_proof(facts.get('parity'))}",
        f"  {engine.max_num_seqs} slots, {engine.max_model_len} tokens each, "
        f"{engine.max_kv_tokens} KV tokens in all",
    )


def _proof(parity: object) -> str:
    if not isinstance(parity, dict):
        return ""
    return ", parity passed" if parity.get("passed") is True else ", parity FAILED"
