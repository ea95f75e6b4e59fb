"""The llm package: its command line, with our server as a model of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target

GREEDY = ("-o", "temperature", "0")
OPTIONS = (*GREEDY, "-o", "max_tokens", "32")
ROOM = (*GREEDY, "-o", "max_tokens", "200")
"""For JSON, between whose parts a model may put as much white space as it likes."""


def _run(target: Target, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """llm with a home of its own, where our server is the models `ours` and `ours-text`."""
    home = Path(target.folder) / "llm"
    home.mkdir(exist_ok=True)
    common = {"model_name": target.model, "api_base": target.base, "api_key_name": "ours"}
    models = [
        {"model_id": "ours", **common, "supports_schema": True, "supports_tools": True},
        {"model_id": "ours-text", **common, "completion": True},
    ]
    # JSON is YAML.
    (home / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")
    (home / "keys.json").write_text(json.dumps({"ours": target.key}), encoding="utf-8")
    env = {**os.environ, "LLM_USER_PATH": str(home)}
    command = [sys.executable, "-m", "llm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def _said(target: Target, *arguments: str) -> str:
    done = _run(target, *arguments)
    assert done.returncode == 0, done.stderr[-300:]
    # The program ends what it says with a line break.
    return done.stdout.removesuffix("\n")


def a_prompt(target: Target) -> None:
    want = raw.chat_text(target)
    assert _said(target, "-m", "ours", *OPTIONS, "--no-stream", raw.QUESTION) == want


def a_streamed_prompt(target: Target) -> None:
    assert _said(target, "-m", "ours", *OPTIONS, raw.QUESTION) == raw.chat_text(target)


def a_system_prompt(target: Target) -> None:
    messages = [{"role": "system", "content": "Answer in French."}, *raw.conversation()]
    body = {"messages": messages, "temperature": 0, "max_tokens": 32}
    want = raw.ask(target, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert _said(target, "-m", "ours", *OPTIONS, "-s", "Answer in French.", raw.QUESTION) == want


def a_text_model(target: Target) -> None:
    prompt = "The capital of France is"
    want = raw.complete(target, prompt, max_tokens=32)["choices"][0]["text"]
    assert _said(target, "-m", "ours-text", *OPTIONS, prompt) == want


def a_schema(target: Target) -> None:
    schema = json.dumps(raw.SHAPE)
    text = _said(target, "-m", "ours", *ROOM, "--schema", schema, "Paris is a large city.")
    made = json.loads(text)
    assert made["city"] in raw.SHAPE["properties"]["city"]["enum"]
    assert isinstance(made["large"], bool)


def the_log(target: Target) -> None:
    _said(target, "-m", "ours", *OPTIONS, raw.QUESTION)
    (entry,) = json.loads(_said(target, "logs", "--json", "-n", "1"))
    want: dict[str, Any] = raw.chat(target)
    assert entry["response"] == want["choices"][0]["message"]["content"]
    assert entry["input_tokens"] == want["usage"]["prompt_tokens"]
    assert entry["output_tokens"] == want["usage"]["completion_tokens"]


def a_wrong_key(target: Target) -> None:
    done = _run(target, "-m", "ours", "--key", "wrong", raw.QUESTION)
    assert done.returncode == 1
    assert "no valid API key" in done.stderr
