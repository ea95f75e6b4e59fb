"""serve: what its operator and waiting programs are told."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.runtime.config import EngineConfig
from trtllm_lite.runtime.server.service import ModelCard, Service
from trtllm_lite.runtime.server.settings import Limits, ServerConfig, key_digest
from trtllm_lite.tools.console import Console, Settings
from trtllm_lite.tools.serve_says import banner, reader_may_leave, ready_line, warn_of_settings

URL = "http://127.0.0.1:8000"


def service_of(config: ServerConfig, *cards: ModelCard) -> Service:
    service = Service(config)
    for card in cards:
        llm: Any = SimpleNamespace(config=EngineConfig(3, 64, 16, 150), time_steps=lambda _: None)
        service.ready(llm, card)
    return service


def test_the_banner_tells_models_limits_keys_and_places() -> None:
    first = ModelCard(("a", "b"), 0, "fp", {"source": "org/one", "parity": {"passed": True}})
    second = ModelCard(("c",), 0, "fp", {"source": "org/two", "parity": {"passed": False}})
    third = ModelCard(("d",), 0, "fp", {"source": "org/three", "parity": None})
    config = ServerConfig(key_digests=(key_digest("x"), key_digest("y")), max_queue=7)
    lines = banner(service_of(config, first, second, third), URL, 1.26)
    assert lines[:6:2] == [
        "model a, b (org/one), parity passed",
        "model c (org/two), parity FAILED",
        "model d (org/three)",
    ]
    assert lines[1] == "  3 slots, 64 tokens each, 150 KV tokens in all"
    rest = "\n".join(lines[6:])
    for part in ("7 sequences may wait", "600 s", "8.0 MiB", "10000 connections", "API keys: 2"):
        assert part in rest
    for place in ("/ ", "/v1", "/docs", "/metrics"):
        assert f"{URL}{place}" in rest
    assert "ready after 1.3 s" in rest
    assert "API keys: none" in "\n".join(banner(service_of(ServerConfig(), first), URL, 0))


def test_the_ready_line_is_for_programs() -> None:
    cards = ModelCard(("a", "b"), 0, "fp"), ModelCard(("c",), 0, "fp")
    service = service_of(ServerConfig(), *cards)
    assert ready_line(service, URL, "text") == f"ready url={URL} model=a pid={os.getpid()}"
    told = json.loads(ready_line(service, URL, "json"))
    names = {"model": "a", "models": ["a", "b", "c"]}
    assert told == {"event": "ready", "url": URL, "pid": os.getpid(), **names}


def test_what_is_allowed_and_seldom_meant_is_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    safe, keys = ServerConfig(), (key_digest("x"),)
    warned = {
        replace(safe, host="0.0.0.0"): "anybody who reaches 0.0.0.0",
        replace(safe, cors_origins=("*",)): "any page",
        replace(safe, limits=Limits(connections=160)): "at most 160 connections",
        safe: "",
        replace(safe, host="::1"): "",
        replace(safe, host="0.0.0.0", cors_origins=("*",), key_digests=keys): "",
    }
    for config, text in warned.items():
        warn_of_settings(Console(Settings(quiet=True)), config)
        told = capsys.readouterr().err
        assert text in told if text else told == ""


def test_a_reader_who_left_ends_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        for _ in range(2):
            with reader_may_leave(stream):
                stream.write("hello\n")
