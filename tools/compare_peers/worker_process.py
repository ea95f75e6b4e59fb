"""The runner's end of a worker: start, ask, pause, measure, end."""

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trtllm_lite
from trtllm_lite.tools.compare_peers.contenders import Contender
from trtllm_lite.tools.compare_peers.protocol import ProtocolError, decode_reply

TIMEOUT = 300  # seconds for one answer
ROOT = Path(trtllm_lite.__file__).resolve().parent.parent

# The checkout goes to the end of the path, so that the environment's own packages come first.
BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from trtllm_lite.tools.compare_peers.worker import main; main(sys.argv[2])"
)


class WorkerProcess:
    """A contender's process. It runs only while it is asked something: in between it is stopped
    (SIGSTOP), so that threads that spin while they wait take nothing from the others."""

    def __init__(self, contender: Contender, log: Path) -> None:
        self.contender = contender
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [contender.python, "-P", "-c", BOOT, str(ROOT), contender.peer],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=log.parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, **arguments: Any) -> Any:
        """The value of the reply. Raises RuntimeError with the runtime's error, and ProtocolError
        when the worker died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            # One reply answers one request, so nothing of it can be in the buffer yet.
            if not select.select([self._process.stdout], [], [], TIMEOUT)[0]:
                raise ProtocolError(f"no answer to {op!r} within {TIMEOUT} s")
            return decode_reply(self._process.stdout.readline())
        except (ProtocolError, BrokenPipeError) as error:
            raise ProtocolError(f"{self.contender.name}: {error}; see {self._log}") from error

    def pause(self) -> None:
        """Let it run no more until it is asked again."""
        self._process.send_signal(signal.SIGSTOP)

    def memory(self) -> dict[str, int]:
        """Bytes: "rss" and "peak_rss" as the kernel counts them, "pss" with pages that several
        processes map counted in part to each."""
        folder = Path("/proc", str(self.pid))
        status = read_kib(folder / "status")
        rollup = read_kib(folder / "smaps_rollup")
        return {"rss": status["VmRSS"], "peak_rss": status["VmHWM"], "pss": rollup["Pss"]}

    def close(self) -> None:
        """End it; by force when it does not end by itself."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_kib(path: Path) -> dict[str, int]:
    """The lines "Name: 12 kB" of a file in /proc, in bytes."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def load_average() -> float:
    return round(os.getloadavg()[0], 2)
