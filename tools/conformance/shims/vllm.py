"""vLLM's suite, pointed at our server.

In place of its `tests/utils.py`, which needs all of vLLM, is a module with a `RemoteOpenAIServer`
that starts ours. `vllm` and `torch` are there to be imported and named; using something of them
fails the test, since such a test is of vLLM's own classes. What tests only use as a reference does
work: the model's tokenizer, by transformers, and the size of its vocabulary.

Options of `vllm serve` that have a counterpart are handed on, LoRA names become names of the one
model, and options about vLLM's engine (dtype, memory, parallelism) have no effect.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.tools.conformance.shims.absent import AbsentFinder, AbsentModule
from trtllm_lite.tools.conformance.shims.servers import Servers, servers_of

PACKAGES = ("vllm", "torch", "fastapi")
HANDED_ON = {
    "--api-key": "--api-key",
    "--served-model-name": "--served-model-name",
    "--tool-call-parser": "--tool-call-parser",
    "--shutdown-timeout": "--drain-timeout",
}
LORAS, LENGTH = "--lora-modules", "--max-model-len"
EXIT_SECONDS = 30


@dataclass(frozen=True)
class Bundle:
    """What tests want to know of the model that is served."""

    folder: Path
    longest: int
    vocabulary: int

    @classmethod
    def read(cls, folder: Path) -> "Bundle":
        found = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
        return cls(folder, found["limits"]["max_model_len"], found["model"]["vocab_size"])

    def tokenizer(self, *_: object, **__: object) -> Any:
        """As transformers has it."""
        made = import_module("transformers").PreTrainedTokenizerFast(
            tokenizer_file=str(self.folder / "tokenizer.json")
        )
        made.chat_template = (self.folder / "chat_template.jinja").read_text(encoding="utf-8")
        return made

    def config(self, *_: object, **__: object) -> "ModelConfig":
        return ModelConfig(self.vocabulary)


@dataclass(frozen=True)
class ModelConfig:
    """In place of vLLM's."""

    vocabulary: int

    def get_vocab_size(self) -> int:
        return self.vocabulary


class RemoteServer:
    """Ours, under the model's name that the test gives it."""

    DUMMY_API_KEY = "token-abc123"
    servers: Servers
    bundle: Bundle

    def __init__(self, model: str, args: Sequence[str] = (), **_: object) -> None:
        options = translated(args, self.bundle.longest)
        self._options = ("--served-model-name", model, *options)
        running = self.servers.get(*self._options)
        self.proc, self.url_root, self.port = running.process, running.url, running.port
        self.host = "127.0.0.1"

    def __enter__(self) -> "RemoteServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.servers.drop(*self._options)

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> Any:
        return self._client("openai", "OpenAI", options)

    def get_async_client(self, **options: Any) -> Any:
        return self._client("openai", "AsyncOpenAI", options)

    def get_client_anthropic(self, **options: Any) -> Any:
        return self._client("anthropic", "Anthropic", options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        return self._client("anthropic", "AsyncAnthropic", options)

    def _client(self, package: str, name: str, options: Mapping[str, Any]) -> Any:
        base = self.url_for("v1") if package == "openai" else self.url_root
        given = {"timeout": 600, "base_url": base, "api_key": self.DUMMY_API_KEY}
        make = getattr(import_module(package), name)
        return make(**{**given, "max_retries": 0, **options})

    def _get_process_termination_timeout(self) -> float:
        return EXIT_SECONDS


def translated(args: Sequence[str], longest: int) -> tuple[str, ...]:
    """Options of `vllm serve` as ours. `longest`: the context that our model has at most."""
    made, name = list[str](), ""
    for word in args:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            name = name.replace("_", "-")
            made += _option(name, value, longest) if value else []
        else:
            made += _option(name, word, longest)
    return tuple(made)


def _option(name: str, value: str, longest: int) -> list[str]:
    if name == LORAS:
        return ["--served-model-name", value.partition("=")[0]]
    if name == LENGTH:
        return [LENGTH, str(min(int(value), longest))]
    return [HANDED_ON[name], value] if name in HANDED_ON else []


class Hub:
    """In place of the hub of models."""

    def snapshot_download(self, *_: object, **__: object) -> str:
        """Where the weights of a LoRA would be, which nothing reads."""
        return "none"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """The suite's own conftest files want vLLM too."""
    RemoteServer.bundle = bundle = Bundle.read(early_config.known_args_namespace.serve_bundle)
    stand_ins: dict[str, object] = {
        "tests.utils.RemoteOpenAIServer": RemoteServer,
        "tests.utils.ROCM_ENV_OVERRIDES": {},
        "tests.utils.ROCM_EXTRA_ARGS": [],
        "vllm.tokenizers.get_tokenizer": bundle.tokenizer,
        "vllm.transformers_utils.repo_utils.hf_api": Hub,
        "vllm.config.ModelConfig": bundle.config,
    }
    sys.meta_path.append(AbsentFinder(PACKAGES, stand_ins))
    sys.modules["tests.utils"] = AbsentModule("tests.utils", stand_ins)


def pytest_configure(config: pytest.Config) -> None:
    RemoteServer.servers = servers_of(config)
