"""llama.cpp's suite, pointed at our server.

The suite starts `llama-server` for every test, unless DEBUG_EXTERNAL is set: then it takes
what listens on a port. Here that is one server of ours, and another one with a key for tests that
ask for one. llama.cpp serves OpenAI's routes with and without /v1, we with it only: the path is
completed.
What else a test sets for its server (context, slots, template, model) has no effect.
"""

import os
import sys
from types import ModuleType
from typing import Any

import pytest

from trtllm_lite.tools.conformance.shims.servers import Servers, servers_of

OPENAI_PATHS = ("/chat/completions", "/models", "/responses")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["DEBUG_EXTERNAL"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """The suite's `utils` has been imported by now, and no test has run."""
    redirect(sys.modules["utils"], servers_of(config))


def redirect(utils: ModuleType, servers: Servers) -> None:
    """Make the suite's `ServerProcess` talk to ours."""
    process = utils.ServerProcess

    def port(self: Any) -> int:
        key = self.api_key
        return servers.get(*(("--api-key", key) if key else ())).port

    def ignore(self: Any, value: int) -> None:
        """The port that a test or a preset wants."""

    process.server_port = property(port, ignore)
    for name in ("make_request", "make_stream_request"):
        setattr(process, name, completing(getattr(process, name)))


def completing(method: Any) -> Any:
    """The method with /v1 before OpenAI's paths."""

    def call(self: Any, verb: str, path: str, *args: Any, **kwargs: Any) -> Any:
        full = f"/v1{path}" if path in OPENAI_PATHS else path
        return method(self, verb, full, *args, **kwargs)

    return call
