"""Which process listens on a TCP port. Linux only, and only as far as this user may look."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp (include/net/tcp_states.h of Linux)."""


def holder_of(port: int, root: Path = ROOT) -> str | None:
    """`python3 (pid 4711)`; None where nobody is found. `root`: of the file system."""
    sockets = set(_listening(port, root / "proc"))
    if not sockets:
        return None
    for folder in (root / "proc").glob("[0-9]*"):
        if not sockets.isdisjoint(_links(folder / "fd")):
            return f"{_name(folder)} (pid {folder.name})"
    return None


def _listening(port: int, proc: Path) -> Iterator[str]:
    """Sockets as the links in /proc/PID/fd call them. One port may have several, by address."""
    for table in ("tcp", "tcp6"):
        for line in _read(proc / "net" / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _LISTEN:
                continue
            if int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def _links(folder: Path) -> Iterator[str]:
    """Where the open files of a process lead to; those that vanish meanwhile are left out."""
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):
                yield str(entry.readlink())


def _name(folder: Path) -> str:
    return _read(folder / "comm").strip() or "a process"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
