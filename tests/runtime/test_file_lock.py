"""One holder at a time, between threads and between processes; a dead holder holds nothing."""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from trtllm_lite.runtime.file_lock import locked

pytest.importorskip("fcntl")


def test_only_one_holds_it(tmp_path: Path) -> None:
    inside, most = 0, 0
    count = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with locked(tmp_path / "lock", 30) as alone:
            assert alone
            with count:
                inside += 1
                most = max(most, inside)
            time.sleep(0.005)
            with count:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_waiting_is_told_once_and_ends(tmp_path: Path) -> None:
    told: list[str] = []
    with (
        locked(tmp_path / "lock", 1),
        pytest.raises(TimeoutError, match="kept the lock"),
        locked(tmp_path / "lock", 0.12, lambda: told.append("waiting")),
    ):
        pytest.fail("two hold it")
    assert told == ["waiting"]


def test_the_lock_file_is_never_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"."), locked(tmp_path / "lock", 1):
        pytest.fail("a link was followed")
    assert not (tmp_path / "elsewhere").exists()


def hold(path: Path, holds: Event) -> None:
    with locked(path, 30):
        holds.set()
        time.sleep(60)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    holds = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "lock", holds))
    process.start()
    assert holds.wait(30)
    with pytest.raises(TimeoutError), locked(tmp_path / "lock", 0.01):
        pytest.fail("two processes hold it")
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with locked(tmp_path / "lock", 5) as alone:
        assert alone
