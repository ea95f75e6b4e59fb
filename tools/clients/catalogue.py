"""Which clients there are, and what each one needs installed."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtllm_lite.runtime.errors import UsageError

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
REQUIREMENTS = HERE / "requirements.json"

Language = Literal["python", "node"]


@dataclass(frozen=True)
class Client:
    """One client: an environment, and the scripts that run in it.

    title: what people call it. package: whose version is reported; empty for what the language
    brings along.
    """

    name: str
    title: str
    package: str
    scripts: tuple[str, ...]
    language: Language = "python"

    def script(self, name: str) -> Path:
        return SCRIPTS / f"{name}.{'py' if self.language == 'python' else 'mjs'}"


CATALOGUE = (
    Client("http", "http.client (Python)", "", ("http_client",)),
    Client(
        "openai",
        "openai (Python)",
        "openai",
        ("openai_python", "openai_errors", "openai_responses"),
    ),
    Client("openai-node", "openai (Node)", "openai", ("openai_node",), "node"),
    Client("anthropic", "anthropic (Python)", "anthropic", ("anthropic_python",)),
    Client("langchain", "langchain-openai", "langchain-openai", ("langchain_python",)),
    Client("instructor", "instructor", "instructor", ("instructor_python",)),
    Client("llm", "llm", "llm", ("llm_python",)),
    Client("vercel", "Vercel AI SDK (Node)", "ai", ("vercel_node",), "node"),
    Client("lm-eval", "lm-eval, local-completions", "lm_eval", ("lm_eval_python",)),
    Client("k6", "k6, 64 streams", "k6", ("k6_load",)),
    Client("litellm", "litellm", "litellm", ("litellm_python",)),
)


def chosen(names: Iterable[str]) -> list[Client]:
    """The clients of these names, in the catalogue's order; all of them where there is no name.
    Raises UsageError for a name that is none."""
    wanted = set(names)
    unknown = wanted - {client.name for client in CATALOGUE}
    if unknown:
        known = ", ".join(client.name for client in CATALOGUE)
        raise UsageError(f"no client {sorted(unknown)[0]!r}; known: {known}")
    return [client for client in CATALOGUE if client.name in wanted or not wanted]


def requirements(client: Client) -> dict[str, str]:
    """Every package that the client's environment holds, with its exact version."""
    pins: dict[str, dict[str, str]] = json.loads(REQUIREMENTS.read_text(encoding="utf-8"))
    return pins[client.name]
