"""Our servers for a suite: one for each set of options, started when a test first needs it."""

import json
import select
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

START_SECONDS = 300
STOP_SECONDS = 60
_KEY = pytest.StashKey["Servers"]()


@dataclass
class Running:
    """One server's process and its address, without a slash at the end."""

    process: "subprocess.Popen[str]"
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def stop(self) -> None:
        """Tell it to end, wait until it has, and take what it holds."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Servers:
    """Starts servers with `command` and further options, and keeps them until `close`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = tuple(command)
        self._log = log
        self._running: dict[tuple[str, ...], Running] = {}

    def get(self, *options: str) -> Running:
        """The server with these options. Raises RuntimeError when it does not become ready."""
        found = self._running.get(options)
        if found is None:
            found = self._running[options] = self._start(options)
        return found

    def drop(self, *options: str) -> None:
        """End the server with these options."""
        found = self._running.pop(options, None)
        if found is not None:
            found.stop()

    def close(self) -> None:
        """End all of them."""
        for options in list(self._running):
            self.drop(*options)

    def _start(self, options: tuple[str, ...]) -> Running:
        with self._log.open("ab") as errors:
            process = subprocess.Popen(
                [*self._command, "--port", "0", "--log-format", "json", *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self._log.parent,
                text=True,
            )
        assert process.stdout is not None
        ready = select.select([process.stdout], [], [], START_SECONDS)[0]
        line = process.stdout.readline() if ready else ""
        if not line:
            Running(process, "").stop()
            raise RuntimeError(f"the server with {' '.join(options)} did not start: {self._log}")
        return Running(process, json.loads(line)["url"])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--serve", action="append", default=[], help="A word of the serve command.")
    group.addoption("--serve-log", type=Path, help="What the servers write.")
    group.addoption("--serve-bundle", type=Path, help="What they serve.")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    command, log = config.getoption("--serve"), config.getoption("--serve-log")
    config.stash[_KEY] = Servers(command, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _KEY in config.stash:
        config.stash[_KEY].close()


def servers_of(config: pytest.Config) -> Servers:
    """Those of this run."""
    return config.stash[_KEY]


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Servers:
    """Those of this run."""
    return servers_of(request.config)
