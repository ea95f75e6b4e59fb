"""A browser without a window, and live servers for it.

Chromium is driven by its DevTools protocol over two pipes: no driver program, no port.
"""

import asyncio
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.async_engine import AsyncLLM
from trtllm_lite.runtime.server.lifecycle import LoadProgress, Server
from trtllm_lite.runtime.server.listening import bind, url_of
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import ServerConfig

GUARD = 60.0
"""Seconds after which a browser that says nothing counts as hanging."""
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-sandbox", "--no-first-run", "--disable-extensions", "--disable-background-networking"),
)
# Chromium reads its commands from descriptor 3 and writes to 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""
KEYS = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "Tab": 9}


class DevTools:
    """Commands to a browser and its answers: JSON, each ended by a zero byte."""

    def __init__(self, commands: int, answers: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._commands = commands
        self._answers = answers
        self._buffer = b""
        self._last = 0

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command; what happens meanwhile goes to `events`."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], GUARD)
            assert ready, "the browser does not answer"
            data = os.read(self._answers, 2**16)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


class Page:
    """A tab, as its reader uses it."""

    def __init__(self, tools: DevTools) -> None:
        self._tools = tools
        self._target = tools.call("Target.createTarget", url="about:blank")["targetId"]
        attached = tools.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session: str = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self._do(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._do("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window's size, a phone's where it is narrow, and what the system prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._do("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._do("Emulation.setEmulatedMedia", features=[scheme])

    def js(self, expression: str) -> Any:
        """The value of an expression. JavaScript's errors are raised."""
        answer = self._do(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + GUARD
        while not (value := self.js(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.01)
        return value

    def text(self, selector: str) -> str:
        found: str = self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def fill(self, selector: str, text: str) -> None:
        """As if typed, or chosen from a list."""
        self.js(
            f"(() => {{ const f = document.querySelector({json.dumps(selector)});"
            f"f.focus(); f.value = {json.dumps(text)};"
            "for (const name of ['input', 'change'])"
            " f.dispatchEvent(new Event(name, {bubbles: true})); })()"
        )

    def press(self, key: str) -> None:
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self._do("Input.dispatchKeyEvent", type="rawKeyDown", **pressed)
        if key == "Enter":
            self._do("Input.dispatchKeyEvent", type="char", text="\r", **pressed)
        self._do("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def ask(self, question: str) -> None:
        self.fill("#prompt", question)
        self.press("Enter")

    def answered(self) -> None:
        """Wait until no reply is on its way."""
        self.until("document.getElementById('stop').hidden")

    def point(self, selector: str) -> None:
        """Move the mouse there."""
        box = self.js(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)})"
            ".getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self._do("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def complaints(self) -> list[Any]:
        """Errors of scripts and of the security policy; not those of the network."""
        found = []
        for event in self._tools.events:
            entry = event.get("params", {}).get("entry", {})
            wrong = entry.get("level") == "error" and entry.get("source") != "network"
            if event.get("method") == "Runtime.exceptionThrown" or wrong:
                found.append(event["params"])
        return found

    def close(self) -> None:
        self._tools.call("Target.closeTarget", targetId=self._target)

    def _do(self, method: str, **params: Any) -> dict[str, Any]:
        return self._tools.call(method, self._session, **params)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevTools]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("Chromium is not installed; Debian: apt-get install chromium")
    folder = tmp_path_factory.mktemp("chromium")
    with _launched(program, folder) as tools:
        yield tools


@contextmanager
def _launched(program: str, folder: Path) -> Iterator[DevTools]:
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), program]
    command += [*FLAGS, f"--user-data-dir={folder}", "about:blank"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        tools = DevTools(ours_out, ours_in)
        yield tools
        tools.call("Browser.close")
        process.wait(GUARD)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)


@pytest.fixture
def page(browser: DevTools) -> Iterator[Page]:
    """A tab of its own; that nothing went wrong in it is checked at the end."""
    browser.events.clear()
    page = Page(browser)
    page.look(1200, 800)
    yield page
    complaints = page.complaints()
    page.close()
    assert complaints == []


@dataclass
class Site:
    """A live server of fake models, its own thread included."""

    url: str = ""
    sessions: list[Any] = field(default_factory=list)
    may_load: threading.Event = field(default_factory=threading.Event)


NewLLM = Callable[[bool], tuple[AsyncLLM, Any]]
MakeSite = Callable[..., Site]


@pytest.fixture
def site(new_llm: NewLLM, card: ModelCard) -> Iterator[MakeSite]:
    """Starts a server with a model of each of these names. Not `is_open`: steps need permits. Not
    `loaded`: it loads until `may_load` is set."""
    with ExitStack() as stack:

        def start(*names: str, is_open: bool = True, loaded: bool = True) -> Site:
            made = Site()
            if loaded:
                made.may_load.set()
            loads = [_loader(made, new_llm(is_open), card, name) for name in names or ("fake",)]
            stack.enter_context(_served(made, loads))
            return made

        yield start


def _loader(site: Site, made: tuple[AsyncLLM, Any], card: ModelCard, name: str) -> Any:
    llm, session = made
    site.sessions.append(session)
    own = ModelCard((name,), card.created, card.fingerprint, card.facts)

    def load(progress: LoadProgress) -> tuple[AsyncLLM, ModelCard]:
        progress.step("pack")
        progress.advance(2, 5, "bytes")
        site.may_load.wait(GUARD)
        return llm, own

    return load


@contextmanager
def _served(site: Site, loads: list[Any]) -> Iterator[None]:
    first, *others = loads
    ready = threading.Event()
    server = Server(ServerConfig(), first, lambda service: ready.set(), "9.9", others=others)
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.run(sock)

    with bind("127.0.0.1", 0) as sock:
        site.url = f"{url_of(sock)}/"
        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        try:
            if site.may_load.is_set():
                assert ready.wait(GUARD)
            yield
        finally:
            site.may_load.set()
            ready.wait(GUARD)
            for session in site.sessions:
                session.permits.release(1_000_000)
            _stop(server, loops[0])
            thread.join(GUARD)


def _stop(server: Server, loop: asyncio.AbstractEventLoop) -> None:
    stops = server.stops
    assert stops is not None
    for _ in range(2):
        loop.call_soon_threadsafe(stops.tell)
