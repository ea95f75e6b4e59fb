"""The server under test."""

from collections.abc import Iterator

import httpx
import pytest

from trtllm_lite.tools.conformance.frontend.client import Frontend
from trtllm_lite.tools.conformance.shims.servers import Servers


@pytest.fixture(scope="session")
def frontend(servers: Servers) -> Iterator[Frontend]:
    with httpx.Client(base_url=servers.get().url, timeout=300, trust_env=False) as http:
        yield Frontend(http)
