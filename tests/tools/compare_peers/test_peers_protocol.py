"""One request, one reply, over a real process and without one."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from trtllm_lite.tools.compare_peers.adapters.base import ADAPTERS
from trtllm_lite.tools.compare_peers.adapters.fake import PACE, Fake
from trtllm_lite.tools.compare_peers.contenders import Contender
from trtllm_lite.tools.compare_peers.protocol import ProtocolError, Service, decode_reply, serve
from trtllm_lite.tools.compare_peers.quality import score
from trtllm_lite.tools.compare_peers.worker_process import ROOT, WorkerProcess, read_kib

LOAD = {"op": "load", "path": "model", "threads": 1, "slots": 2, "max_len": 64}


def service(path: str = "model") -> Service:
    made = Service(Fake())
    made.answer({**LOAD, "path": path})
    return made


def contender(path: str = "model", peer: str = "fake") -> Contender:
    return Contender("fake 8", peer, sys.executable, path, 8)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stream_has_a_rising_time_for_each_token() -> None:
    value = service().answer({"op": "stream", "prompt": [7, 8], "new": 3})["value"]
    assert value["tokens"] == (7, 8, 7)
    assert PACE <= value["times"][0] < value["times"][1] < value["times"][2]


def test_a_batch_is_timed() -> None:
    value = service().answer({"op": "batch", "prompts": [[1], [2]], "new": 4})["value"]
    assert value["seconds"] >= 4 * PACE


def test_too_few_tokens_are_an_error() -> None:
    reply = service("mute").answer({"op": "stream", "prompt": [1], "new": 2})
    assert reply == {"error": "RuntimeError: asked for 2 tokens, got 0 tokens at 0 times"}


def test_errors_of_the_runtime_are_one_line() -> None:
    reply = Service(Fake()).answer({**LOAD, "path": "two\nlines broken"})
    assert reply == {"error": "RuntimeError: two lines broken cannot be loaded"}


@pytest.mark.parametrize("request_", [{"op": "dance"}, {"op": "stream", "prompt": [1]}, {}])
def test_what_is_no_operation_is_answered(request_: dict[str, object]) -> None:
    assert set(service().answer(request_)) == {"error"}


def test_every_line_gets_one_line() -> None:
    replies = io.StringIO()
    lines = [json.dumps(LOAD), json.dumps({"op": "about"})]
    serve(Service(Fake()), io.StringIO("\n".join(lines) + "\n"), replies)
    first, second = replies.getvalue().splitlines()
    assert decode_reply(first)["seconds"] >= 0
    assert decode_reply(second) == {"version": "fake 1", "paths": ["prefill", "decode"]}


@pytest.mark.parametrize("line", ["", "hello", "[]", "{}", '{"value": 1, "error": "x"}'])
def test_what_is_no_reply_is_refused(line: str) -> None:
    with pytest.raises(ProtocolError):
        decode_reply(line)


def test_the_workers_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no room"):
        decode_reply('{"error": "MemoryError: no room"}')


def test_a_process_answers_whatever_its_runtime_prints(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with WorkerProcess(contender(), log) as worker:
        worker.ask("load", path="model", threads=3, slots=1, max_len=64)
        assert worker.ask("stream", prompt=[5], new=2)["tokens"] == [5, 5]
        with pytest.raises(RuntimeError, match="KeyError"):
            worker.ask("dance")
        assert worker.ask("about")["version"] == "fake 1"
    assert "loaded model with 3 threads" in log.read_text()


def test_a_paused_worker_is_stopped_until_it_is_asked(tmp_path: Path) -> None:
    with WorkerProcess(contender(), tmp_path / "log.txt") as worker:
        worker.ask("about")
        worker.pause()
        deadline = time.monotonic() + 10
        while state_of(worker.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state_of(worker.pid) == "T"
        assert worker.ask("about")["version"] == "fake 1"
        worker.pause()
    assert not Path(f"/proc/{worker.pid}").exists()


def test_a_dead_worker_is_named_with_its_log(tmp_path: Path) -> None:
    with (
        WorkerProcess(contender(peer="nobody"), tmp_path / "log.txt") as worker,
        pytest.raises(ProtocolError, match=r"fake 8: .*log\.txt"),
    ):
        worker.ask("about")
    assert "KeyError: 'nobody'" in (tmp_path / "log.txt").read_text()


def test_a_paused_worker_dies_with_its_runner(tmp_path: Path) -> None:
    code = f"""
import os, sys, signal
from pathlib import Path
from trtllm_lite.tools.compare_peers.contenders import Contender
from trtllm_lite.tools.compare_peers.worker_process import WorkerProcess
worker = WorkerProcess(Contender("x", "fake", sys.executable, "m", 8), Path({str(tmp_path)!r}, "l"))
worker.ask("about")
worker.pause()
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    process, deadline = Path("/proc", done.stdout.strip()), time.monotonic() + 10
    while process.exists() and state_of(int(process.name)) != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process.exists() or state_of(int(process.name)) == "Z"


def test_memory_of_a_worker(tmp_path: Path) -> None:
    with WorkerProcess(contender(), tmp_path / "log.txt") as worker:
        worker.ask("about")
        memory = worker.memory()
    assert 2**20 < memory["pss"] <= memory["rss"] <= memory["peak_rss"] < 2**32


def test_sizes_in_proc_are_bytes(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t   12 kB\nThreads:\t2\n")
    assert read_kib(tmp_path / "status") == {"VmRSS": 12 * 1024}


def test_quality_is_asked_by_path(tmp_path: Path) -> None:
    windows = [list(range(3, 23)), list(range(5, 25))]
    fake = Fake()
    exact = np.stack([fake.logits(window, "prefill") for window in windows])
    np.save(tmp_path / "reference.npy", exact)
    reference = str(tmp_path / "reference.npy")
    for path in fake.paths:
        reply = service().answer(
            {"op": "score", "windows": windows, "reference": reference, "path": path}
        )
        alone = score(partial(Fake().logits, path=path), windows, reference)
        assert reply["value"]["kl"] == alone.kl
        assert (alone.kl < 1e-6) == (path == "prefill")


def test_every_adapter_is_where_the_table_says() -> None:
    for place in ADAPTERS.values():
        module, name = place.split(":")
        path = ROOT / Path(*module.split(".")).with_suffix(".py")
        assert re.search(rf"^class {name}\b", path.read_text(), re.MULTILINE)
