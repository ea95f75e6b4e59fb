"""Exports and servers, one after the other, in a folder of their own: what they leave behind."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.tools.soak.server_process import ServerProcess

KEPT = ".cache"
"""Of a bundle: what is made once on a machine, and meant to stay."""


def left_behind(folder: Path, count: int, echo: Callable[[str], None]) -> list[str]:
    """Make a tiny checkpoint in `folder`, then export and serve it so often. Returns the files,
    temporary ones too, that are there after the last cycle and were not after the first: torch
    makes a folder for its caches once. Raises TrtllmLiteError for a cycle that fails."""
    if count == 0:
        return []
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    _run(folder, "trtllm_lite.tools.make_checkpoint", str(checkpoint), "--shape", "tiny")
    export = ("export", str(checkpoint), "--output", str(bundle), "--overwrite")
    first: set[str] = set()
    for cycle in range(count):
        _run(folder, "trtllm_lite", *export, "--progress", "none", "--quiet")
        server = ServerProcess(bundle, temporary, folder / "log")
        if (code := server.stop().code) != 0:
            raise TrtllmLiteError(f"a server of cycle {cycle} ended with code {code}")
        first = first or files_in(folder)
        echo(f"cycle {cycle + 1} of {count}")
    return sorted(files_in(folder) - first)


def files_in(folder: Path) -> set[str]:
    """Every file and folder below, but those that are meant to stay."""
    paths = (path.relative_to(folder) for path in folder.rglob("*"))
    return {str(path) for path in paths if KEPT not in path.parts}


def _run(folder: Path, module: str, *arguments: str) -> None:
    env = {**os.environ, "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise TrtllmLiteError(f"{module} {arguments[0]}: {done.stderr.strip()[-300:]}")
