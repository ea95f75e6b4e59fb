"""The numbers of replicas, on their way to the front: a file for each, in a folder that both know.

Asking a replica would have to wait for a place among its requests.
"""

import time
from collections.abc import Mapping
from pathlib import Path

SUFFIX = ".prom"


def write_numbers(folder: Path, name: str, text: bytes) -> None:
    """Replace what the replica of that name has told. Raises OSError."""
    part = folder / f"{name}.part"
    part.write_bytes(text)
    part.replace(folder / f"{name}{SUFFIX}")


def read_numbers(folder: Path, most_seconds: float) -> Mapping[str, bytes]:
    """What each replica has told in the last so many seconds."""
    oldest = time.time() - most_seconds
    found = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            if file.stat().st_mtime >= oldest:
                found[file.stem] = file.read_bytes()
        except FileNotFoundError:
            continue
    return found
