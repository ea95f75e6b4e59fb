"""`trtllm-lite serve` as a process of its own: what it says when it starts, and to whom."""

import json
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

GUARD = 60


@contextmanager
def started(
    *args: str, limits: Callable[[], None] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "trtllm_lite", "serve", *args, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--log-format", "json", "--progress", "plain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limits,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def ready(process: "subprocess.Popen[str]") -> Any:
    """The line that says the server is ready."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], GUARD)[0]
    return json.loads(process.stdout.readline())


def few_files(count: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def test_two_models_are_told_and_answer(tiny_bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_bundle, other)
    manifest = json.loads((other / "bundle.json").read_text())
    manifest["source"]["id"] = "another"
    (other / "bundle.json").write_text(json.dumps(manifest))
    few = few_files(256)
    with started(f"first={tiny_bundle}", str(other), "--alias", "a=first", limits=few) as process:
        facts = ready(process)
        assert (facts["model"], facts["models"]) == ("first", ["first", "a", "other"])
        assert facts["pid"] == process.pid
        for name in ("a", "other"):
            body = {"model": name, "prompt": "the river", "max_tokens": 2}
            answer = httpx.post(f"{facts['url']}/v1/completions", json=body, timeout=GUARD)
            assert answer.json()["model"] == name
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD) == 0
        assert process.stderr is not None
        told = process.stderr.read()
    parts = ("model first, a (", "model other (another)", f"{facts['url']}/docs", "API keys: none")
    for part in (*parts, "warning: at most 160 connections", "160 connections"):
        assert part in told


def test_too_few_open_files_are_refused(tiny_bundle: Path) -> None:
    with started(str(tiny_bundle), limits=few_files(64)) as process:
        assert process.wait(GUARD) == 2
        assert process.stderr is not None
        assert "may open 64 files; at least 112 are needed" in process.stderr.read()


def test_nobody_has_to_read_its_messages(tiny_bundle: Path) -> None:
    with started(str(tiny_bundle)) as process:
        assert process.stderr is not None
        process.stderr.close()
        url = ready(process)["url"]
        assert httpx.get(f"{url}/health", timeout=GUARD).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD) == 0
