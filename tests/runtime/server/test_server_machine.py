"""What the server asks the machine: who holds a port, and how many files it may open."""

import os
import resource
import socket
from pathlib import Path

import pytest

from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError
from trtllm_lite.runtime.server.listening import bind
from trtllm_lite.runtime.server.open_files import (
    FEWEST,
    RESERVED,
    WANTED,
    connections_within,
    raise_limit,
)
from trtllm_lite.runtime.server.port_holder import holder_of

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid timeout"
LISTENING = "   0: 0100007F:1F90 00000000:0000 0A 0:0 00:0 0 1000 0 4242 1 0"
CONNECTED = "   1: 0100007F:1F91 0100007F:0050 01 0:0 00:0 0 1000 0 4343 1 0"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A drawn /proc: process 71 listens on port 8080, one is gone meanwhile."""
    net = tmp_path / "proc" / "net"
    net.mkdir(parents=True)
    (net / "tcp").write_text("\n".join((HEADER, LISTENING, CONNECTED, "odd line")) + "\n")
    files = tmp_path / "proc" / "71" / "fd"
    files.mkdir(parents=True)
    (files / "0").symlink_to("/dev/null")
    (files / "5").symlink_to("socket:[4242]")
    (files / "6").symlink_to("socket:[4343]")
    (tmp_path / "proc" / "71" / "comm").write_text("serverd\n")
    (tmp_path / "proc" / "72").mkdir()
    return tmp_path


def test_the_holder_is_the_process_that_listens(machine: Path) -> None:
    assert holder_of(8080, machine) == "serverd (pid 71)"
    assert holder_of(8081, machine) is None
    assert holder_of(80, machine) is None
    assert holder_of(8080, machine / "nowhere") is None


def test_a_port_in_use_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TrtllmLiteError, match=rf"is in use by .+ \(pid {os.getpid()}\)"):
            bind("127.0.0.1", port)


def test_connections_leave_open_files_for_the_rest() -> None:
    assert connections_within(WANTED, 1000) == 1000
    assert connections_within(256, 1000) == 256 - RESERVED
    assert connections_within(RESERVED + FEWEST, 1000) == FEWEST
    with pytest.raises(UsageError, match="may open 64 files"):
        connections_within(64, 1000)


@pytest.mark.parametrize(
    ("soft", "hard", "asked", "result"),
    [
        (1024, 4096, (4096, 4096), 4096),
        (1024, 2**20, (WANTED, 2**20), WANTED),
        (256, 256, None, 256),
        (1024, resource.RLIM_INFINITY, (WANTED, resource.RLIM_INFINITY), WANTED),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, WANTED),
        (2**20, 2**20, None, WANTED),
    ],
)
def test_the_soft_limit_is_raised_within_the_hard_one(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    hard: int,
    asked: tuple[int, int] | None,
    result: int,
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: calls.append(limits))
    assert raise_limit() == result
    assert calls == ([] if asked is None else [asked])
