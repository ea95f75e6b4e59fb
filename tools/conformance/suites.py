"""The suites: where each comes from, what of it runs, and in which environment."""

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHIMS = "trtllm_lite.tools.conformance.shims"
_PYTEST = ("pytest==9.2.0", "pytest-timeout==2.4.0")


@dataclass(frozen=True)
class Archive:
    """A source archive of the package index. `folder`: what of it is kept, with the places of its
    files; `files`: only these below that folder, all of them if there are none."""

    package: str
    version: str
    sha256: str
    folder: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """`archive`: None for tests that are ours, in `home`. `tests`: what pytest is told to run.
    `shims`: modules of `shims/` that stand between. `serve`: options of the server;
    `options`: of pytest.
    `about`: what a reader of the page should know."""

    name: str
    title: str
    archive: Archive | None
    home: Path | None
    tests: tuple[str, ...]
    requirements: tuple[str, ...]
    shims: tuple[str, ...]
    serve: tuple[str, ...]
    about: str
    options: tuple[str, ...] = ()

    @property
    def expected(self) -> Path:
        """The list of what fails and what is left out."""
        return HERE / "expected" / f"{self.name}.txt"

    @property
    def plugins(self) -> tuple[str, ...]:
        """All plugins of a run, by their import names."""
        return tuple(f"{SHIMS}.{name}" for name in ("servers", "recorder", *self.shims))


def named(*names: str) -> tuple[str, ...]:
    """Options that give the model these names, which a suite uses."""
    return tuple(word for name in names for word in ("--served-model-name", name))


LLAMACPP = Suite(
    name="llamacpp",
    title="llama.cpp, server tests",
    archive=Archive(
        package="llama-cpp-python",
        version="0.3.36",
        sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        folder="vendor/llama.cpp/tools/server/tests",
    ),
    home=None,
    tests=("unit",),
    requirements=(
        *_PYTEST,
        *("openai==3.57.0", "requests==2.34.2", "wget==3.2", "filelock==4.2.11"),
    ),
    shims=("llamacpp",),
    serve=named(
        "tinyllama-2",
        "gpt-3.5-turbo-instruct",
        "gpt-3.5-turbo",
        "davinci-002",
        "gpt-4.1",
        "test",
        "codellama70b",
    ),
    about=(
        "The whole folder `tools/server/tests`, which the archive of llama-cpp-python holds, is "
        "collected. It expects a llama-server with one tiny model, stories260K: exact texts, token "
        "counts and llama.cpp's own routes beside OpenAI's. The shim completes OpenAI's paths with "
        "/v1 and starts a server with a key where a test sets one; other settings that a test "
        "makes for its server have no effect. Tests marked as slow need models of billions of "
        "parameters; llama.cpp does not run them by default either."
    ),
    options=("-m", "not slow"),
)

_VLLM_TESTS = (
    "anthropic/test_messages.py",
    "launchers/test_shutdown.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/responses/test_simple.py",
    "openai/test_chunked_prompt.py",
    "serve/instrumentator/test_basic.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
)
_VLLM_BESIDE = ("conftest.py", "openai/responses/conftest.py")

VLLM = Suite(
    name="vllm",
    title="vLLM, entrypoints tests",
    archive=Archive(
        package="vllm",
        version="0.33.0",
        sha256="f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        folder=".",
        files=tuple(f"tests/entrypoints/{name}" for name in (*_VLLM_TESTS, *_VLLM_BESIDE)),
    ),
    home=None,
    tests=tuple(f"tests/entrypoints/{name}" for name in _VLLM_TESTS),
    requirements=(
        *_PYTEST,
        *("pytest-asyncio==1.5.0", "openai==3.57.0", "requests==2.34.2", "anthropic==2.14.0"),
        "httpx==0.28.1",
        *("transformers==5.24.0", "jsonschema==4.26.0", "psutil==7.2.2"),
        *("prometheus-client==0.26.0", "pybase64==1.4.3", "jinja2==3.1.6"),
    ),
    shims=("vllm",),
    serve=("--tool-call-parser", "hermes", "--metrics-alias", "vllm"),
    about=(
        "Files of `tests/entrypoints` that ask a server by HTTP for what we serve; those of "
        "images, sound, embeddings, adapters, reasoning models and token-only serving are not "
        "taken. The shim stands in for vLLM's `tests/utils.py`: every `RemoteOpenAIServer` is a "
        "server of ours under the name of the model that the test asks for. LoRA names are further "
        "names of that model; options about vLLM's engine have no effect; tests of vLLM's own "
        "classes fail, since vLLM is not installed."
    ),
)

TRITON = Suite(
    name="triton",
    title="Triton, OpenAI frontend tests, written anew",
    archive=None,
    home=HERE / "frontend",
    tests=(".",),
    requirements=(*_PYTEST, "httpx==0.28.1"),
    shims=(),
    serve=(*named("served"), "--tool-call-parser", "hermes"),
    about=(
        "Triton's tests of its OpenAI frontend (`python/openai/tests`) are in its repository only: "
        "PyPI, npm and Debian list no package with the server's sources, and tritonclient's wheel "
        "has no tests. What they check over HTTP is checked by "
        "`tools/conformance/frontend/`, which is ours; where Triton's answer is another one by "
        "design, its expectation is kept and the test is on the list. Not carried over: what needs "
        "Triton itself (model repositories, load and unload, LoRA, embeddings, restricted APIs "
        "with header names of their own)."
    ),
)

SUITES = {suite.name: suite for suite in (LLAMACPP, VLLM, TRITON)}
