"""Servers that a check starts, and what the system says of their processes (Linux)."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

_LISTENS = "0A"
_LOOPBACK = (
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",
)
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, little-endian words."""


def start_server(bundle: Path, *options: str) -> "subprocess.Popen[str]":
    """`trtllm-lite serve`, whose line on stdout is JSON."""
    command = [sys.executable, "-m", "trtllm_lite", "serve", str(bundle), *options]
    return subprocess.Popen([*command, "--log-format", "json"], stdout=subprocess.PIPE, text=True)


def url_of(process: "subprocess.Popen[str]") -> str:
    """Blocks until the server takes requests. Raises click.ClickException when it ends instead."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event.get("event") == "ready":
            return str(event["url"])
    raise click.ClickException("the server ended before it was ready")


def descendants(pid: int) -> Sequence[int]:
    """All processes below one."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(word) for task in tasks for word in _text(task).split()]
    return [*children, *(below for child in children for below in descendants(child))]


def title(pid: int) -> str:
    """The command line, as the process may have rewritten it; empty once it is gone."""
    return _text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def reachable(pids: Sequence[int]) -> Sequence[str]:
    """Listening TCP sockets of these processes that are not on a loopback address: hexadecimal
    address and port, as the system lists them."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in _text(Path(f"/proc/net/{table}")).splitlines()[1:]
    ]
    return [
        words[1]
        for words in lines
        if words[3] == _LISTENS and words[9] in inodes and not words[1].startswith(_LOOPBACK)
    ]


def _sockets(pid: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = str(file.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found
