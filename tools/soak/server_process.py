"""`trtllm-lite serve` in a process of its own, and whether it leaves anything behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.tools.soak.samples import children_of, is_running

END_SECONDS = 60.0


@dataclass(frozen=True)
class Ending:
    """How it ended. orphans: of its processes, those that outlived it. leftovers: names of files in
    its folder for temporary files."""

    code: int
    orphans: int
    leftovers: list[str]


class ServerProcess:
    """Starts at once, with `temporary` as its folder for temporary files; `log` gets its stderr.
    Raises TrtllmLiteError when it does not come to serve."""

    def __init__(
        self, bundle: Path, temporary: Path, log: Path, options: Sequence[str] = ()
    ) -> None:
        self._temporary = temporary
        command = [sys.executable, "-m", "trtllm_lite", "serve", str(bundle), "--port", "0"]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*command, "--log-format", "json", "--progress", "none", *options],
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, "TMPDIR": str(temporary)},
            )
        told = self._ready()
        if told is None:
            self.kill()
            last = log.read_text(errors="replace").splitlines()[-1:]
            raise TrtllmLiteError(f"the server does not start: {' '.join(last)[:300]}")
        self.url: str = told["url"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> Ending:
        """As a supervisor does. A server that does not end is killed, and its code says so."""
        family = children_of(self.pid)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()
        return Ending(
            code=self._process.returncode,
            orphans=sum(_outlives(pid) for pid in family),
            leftovers=sorted(path.name for path in self._temporary.iterdir()),
        )

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _ready(self) -> dict[str, Any] | None:
        """The line that says that requests are taken; None when it ends without one."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told.get("event") == "ready":
                return told
        return None

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()


def _outlives(pid: int) -> bool:
    """Whether the process still runs after a moment: its end follows that of its parent."""
    for _ in range(100):
        if not is_running(pid):
            return False
        time.sleep(0.02)
    return True
