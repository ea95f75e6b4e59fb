"""A lock between processes on a file. It is released when its holder ends, however it ends."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

POLL_S = 0.05


@contextmanager
def locked(
    path: Path, timeout_s: float, waiting: Callable[[], None] | None = None
) -> Iterator[bool]:
    """Hold the lock; True while it is held, False where the system or the file system has no
    locks. `waiting` is called once when somebody else holds it.

    Raises OSError when the file cannot be made, TimeoutError (an OSError) when the wait is over.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        yield _acquire(fd, timeout_s, waiting)
    finally:
        os.close(fd)


def _acquire(fd: int, timeout_s: float, waiting: Callable[[], None] | None) -> bool:
    try:
        fcntl = import_module("fcntl")
    except ModuleNotFoundError:  # only POSIX has it
        return False
    deadline, told = time.monotonic() + timeout_s, False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told and waiting is not None:
                waiting()
            told = True
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process kept the lock for {timeout_s:.0f} s") from None
            time.sleep(POLL_S)
        except OSError:
            return False
        else:
            return True
