"""`serve` as a process: what supervisors, shells and administrators do to it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

KEY = "key-of-a-client"
PATIENCE = 60
OPEN_FILES = 128
GOLDEN = {"prompt": "the river ran", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@dataclass(frozen=True)
class Served:
    """A server that has said that it is ready."""

    process: "subprocess.Popen[bytes]"
    log: Path
    temporary: Path
    client: httpx.Client
    limited: bool = False
    """With few descriptors, of which asyncio itself writes a traceback."""

    def golden(self) -> str:
        answer = self.client.post("/v1/completions", json=GOLDEN)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def end(self) -> int:
        """As a supervisor ends it; its exit code. Idempotent."""
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; at the end none of them has left a file, a process or a traceback behind."""
    made: list[Served] = []
    numbers = count()

    def start(bundle: Path, *options: str, before: str = "") -> Served:
        folder = tmp_path / str(next(numbers))
        (folder / "tmp").mkdir(parents=True)
        arguments = ["-m", "trtllm_lite", "serve", str(bundle), "--port", "0"]
        command = [sys.executable, *arguments, "--log-format", "json", *options]
        with (folder / "log").open("wb") as sink:
            process = subprocess.Popen(
                ["/bin/sh", "-c", f'{before} exec "$@"', "sh", *command],
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, "TMPDIR": str(folder / "tmp"), "HOME": str(folder / "tmp")},
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        url = json.loads(line)["url"]
        client = httpx.Client(
            base_url=url, timeout=PATIENCE, headers={"authorization": f"Bearer {KEY}"}
        )
        made.append(Served(process, folder / "log", folder / "tmp", client, bool(before)))
        return made[-1]

    yield start
    families = [children_of(served.process.pid) for served in made]
    codes = [served.end() for served in made]
    assert codes == [0] * len(made)
    for served, family in zip(made, families, strict=True):
        until(partial(all_ended, family))
        assert list(served.temporary.iterdir()) == []
        assert served.limited or "Traceback" not in served.log.read_text()


def test_it_serves_without_a_reader_and_logs_neither_keys_nor_prompts(
    serve: Serve, tiny_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    files = sorted(path.name for path in tiny_bundle.iterdir())
    served = serve(tiny_bundle, "--api-key-file", str(tmp_path / "keys"))
    assert served.process.stdout is not None
    served.process.stdout.close()  # as `| head -1` does
    text = served.golden()
    assert httpx.get(f"{served.client.base_url}/v1/models").status_code == 401
    forged = {"model": "a\nforged line\x1b[31m", "prompt": "a secret prompt"}
    assert served.client.post("/v1/completions", json=forged).status_code == 404
    assert served.client.get("/a%0Aforged%1b[31m").status_code == 404
    assert served.golden() == text
    command = (Path("/proc") / str(served.process.pid) / "cmdline").read_bytes()
    assert KEY.encode() not in command
    assert KEY not in served.client.get("/metrics").text
    family = children_of(served.process.pid)
    assert len(family) >= 1, "the chat template is rendered in a process of its own"
    assert served.end() == 0
    until(partial(all_ended, family))
    log = served.log.read_text()
    for secret in (KEY, "secret prompt", "the river", text):
        assert secret not in log
    told = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert {"/v1/completions", "/a\nforged\x1b[31m"} <= {line.get("path") for line in told}
    assert not any(line.startswith("forged") for line in log.splitlines())
    assert set(files) <= {path.name for path in tiny_bundle.iterdir()} <= {*files, ".cache"}


def test_streams_end_after_the_signal_and_newcomers_are_turned_away(
    serve: Serve, tiny_bundle: Path
) -> None:
    served = serve(tiny_bundle)
    body = {**GOLDEN, "max_tokens": 40, "stream": True}
    whole = served.client.post("/v1/completions", json={**body, "stream": False}).json()

    def read(i: int) -> str | None:
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 503:
                return None
            lines = answer.iter_lines()
            told = [next(lines)]
            if i == 0:
                served.process.send_signal(signal.SIGTERM)
            return "".join(frame_text(line) for line in [*told, *lines])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: read_or_refused(read, i), range(8)))
    want = whole["choices"][0]["text"]
    assert texts[0] == want
    assert set(texts) <= {want, None}
    assert served.process.wait(PATIENCE) == 0
    with pytest.raises(httpx.ConnectError):
        served.client.get("/health")


def read_or_refused(read: Callable[[int], str | None], i: int) -> str | None:
    """None for one that came too late for the port."""
    try:
        return read(i)
    except httpx.TransportError:
        return None


def frame_text(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    event: Any = json.loads(line.removeprefix("data: "))
    return "".join(choice["text"] for choice in event["choices"])


def test_a_bundle_may_be_replaced_while_two_serve_it(
    serve: Serve, tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle, ignore=shutil.ignore_patterns(".cache"))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: serve_one(serve, bundle), range(2))
    text = first.golden()
    assert second.golden() == text
    bundle.rename(tmp_path / "old")
    bundle.mkdir()
    (bundle / "bundle.json").write_text("{}")
    shutil.rmtree(tmp_path / "old")
    for served in (first, second):
        assert served.golden() == text
        chat = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 2}
        assert served.client.post("/v1/chat/completions", json=chat).status_code == 200


def serve_one(serve: Serve, bundle: Path) -> Served:
    return serve(bundle)


def test_without_descriptors_it_waits_and_does_not_spin(serve: Serve, tiny_bundle: Path) -> None:
    served = serve(tiny_bundle, before=f"ulimit -n {OPEN_FILES};")
    text = served.golden()
    address = (served.client.base_url.host, served.client.base_url.port)
    crowd = [socket.create_connection(address, timeout=PATIENCE) for _ in range(200)]
    try:
        until(lambda: sum(map(is_closed, crowd)) >= 100)
        before = processor_seconds(served.process.pid)
        time.sleep(1)
        assert processor_seconds(served.process.pid) - before < 0.7
    finally:
        for sock in crowd:
            sock.close()
    until(lambda: descriptors(served.process.pid) < OPEN_FILES // 2)
    assert served.golden() == text


def is_closed(sock: socket.socket) -> bool:
    """By the server."""
    try:
        return sock.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def descriptors(pid: int) -> int:
    return sum(1 for _ in (Path("/proc") / str(pid) / "fd").iterdir())


def processor_seconds(pid: int) -> float:
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in (Path("/proc") / str(pid) / "task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def all_ended(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
