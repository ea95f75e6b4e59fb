"""Our server as its users start it: a process, a free port, a key."""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.runtime.manifest import Limits
from trtllm_lite.runtime.manifest_io import read_manifest

MODEL = "client-test"
LIMITS = Limits(max_num_seqs=16, max_model_len=2048)
"""Of the server, where the bundle allows as much."""
QUEUE = 24
START_SECONDS = 300
END_SECONDS = 60


class ServeError(TrtllmLiteError):
    """The server did not start, or not in time; the text names its log."""


@dataclass(frozen=True)
class Running:
    """A server that is ready. context: most tokens of prompt and answer together."""

    url: str
    key: str
    context: int


@dataclass
class Ending:
    """How the server ended: known when the block of `served` is left."""

    code: int | None = None


@contextmanager
def served(
    bundle: Path, folder: Path, log: Path, ending: Ending, port: int = 0
) -> Iterator[Running]:
    """A server of the bundle for the length of the block, told to stop at its end. `folder` is for
    the key's file. Raises BundleError, ServeError."""
    limits = limits_of(bundle)
    key = secrets.token_urlsafe(24)
    keys = folder / "keys.txt"
    keys.touch(mode=0o600)
    keys.write_text(key, encoding="utf-8")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command(bundle, keys, limits, port), stdout=subprocess.PIPE, stderr=errors
        )
    try:
        facts = json.loads(_ready_line(process, log))
        yield Running(facts["url"], key, limits.max_model_len)
    finally:
        ending.code = _end(process)
        keys.unlink()


def limits_of(bundle: Path) -> Limits:
    """`LIMITS`, or less. Raises BundleError."""
    most = read_manifest(bundle).limits
    return Limits(
        min(LIMITS.max_num_seqs, most.max_num_seqs), min(LIMITS.max_model_len, most.max_model_len)
    )


def command(bundle: Path, keys: Path, limits: Limits, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "trtllm_lite", "serve", str(bundle)),
        *("--port", str(port), "--api-key-file", str(keys), "--served-model-name", MODEL),
        *("--max-num-seqs", str(limits.max_num_seqs), "--max-queue", str(QUEUE)),
        *("--max-model-len", str(limits.max_model_len), "--log-format", "json"),
        *("--progress", "none"),
    ]


def _ready_line(process: "subprocess.Popen[bytes]", log: Path) -> bytes:
    assert process.stdout is not None
    found, end = b"", time.monotonic() + START_SECONDS
    while not found.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0, end - time.monotonic()))[0]:
            raise ServeError(f"the server was not ready within {START_SECONDS} s; see {log}")
        data = os.read(process.stdout.fileno(), 4096)
        if not data:
            raise ServeError(f"the server did not start; see {log}")
        found += data
    return found


def _end(process: "subprocess.Popen[bytes]") -> int:
    """The exit code. By force when it does not end by itself."""
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if process.stdout is not None:
        process.stdout.close()
    return code
