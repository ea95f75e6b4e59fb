"""ONNX Runtime's builds report to their maker unless told not to: with us they are told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPEN = """
import trtllm_lite, os
from trtllm_lite.runtime.backends.onnxruntime import version
version()
print(os.environ["ORT_DISABLE_TELEMETRY"])
"""


def run(home: Path, **variables: str) -> str:
    """What the program prints, with a home of its own."""
    inherited = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    env = {**inherited, "HOME": str(home), "TMPDIR": str(home), **variables}
    env.pop("XDG_CACHE_HOME", None)
    done = subprocess.run(
        [sys.executable, "-c", OPEN], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it keeps its files in other places")
def test_nothing_is_kept_to_be_sent(tmp_path: Path) -> None:
    assert run(tmp_path) == "1"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_who_wants_it_may_have_it(tmp_path: Path) -> None:
    assert run(tmp_path, ORT_DISABLE_TELEMETRY="0") == "0"
