"""Ctrl-C and a supervisor's stop in the middle of a real export, as the shell sees them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_lite.runtime.manifest import MANIFEST_NAME
from trtllm_lite.tools.make_checkpoint import Shape, make_checkpoint

ONE_LAYER = Shape(64, 1, 4, 2, 96, 160, True)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_old_bundle_and_nothing_else(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    make_checkpoint(tmp_path / "model", ONE_LAYER, sparse=False, seed=0)
    old = tmp_path / "place" / "out"
    old.mkdir(parents=True)
    (old / MANIFEST_NAME).write_text("the old bundle")
    command = [sys.executable, "-m", "trtllm_lite", "export", str(tmp_path / "model")]
    command += ["-o", str(old), "--overwrite", "--max-model-len", "64", "--progress", "json"]
    seen: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stderr is not None
        for line in it.stderr:
            seen.append(line)
            if json.loads(line).get("name") == "write the weights":
                partials = [p.name for p in old.parent.iterdir() if p != old]
                it.send_signal(sent)
                break
        rest = it.stderr.read()
        assert it.stdout is not None
        out = it.stdout.read()
    assert it.returncode == code, (seen, rest)
    assert ("interrupted" in rest) == (sent is signal.SIGINT)
    assert "Traceback" not in rest
    assert out == ""
    assert len(partials) == 1, "it was interrupted while its work stood beside the output"
    assert [p.name for p in old.parent.iterdir()] == ["out"]
    assert [p.name for p in old.iterdir()] == [MANIFEST_NAME]
    assert (old / MANIFEST_NAME).read_text() == "the old bundle"
