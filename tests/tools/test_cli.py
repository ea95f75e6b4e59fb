"""The program as a whole: lazy help, values from everywhere, one-line errors, pipes, completion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from trtllm_lite import __version__
from trtllm_lite.runtime.errors import StepError
from trtllm_lite.tools import inspect
from trtllm_lite.tools.cli import COMMANDS, cli
from trtllm_lite.tools.command import Run, console_of, option, subcommand
from trtllm_lite.tools.options import Count, LogitBias, Text

HEAVY = ("numpy", "onnxruntime", "onnx", "torch", "transformers", "tokenizers", "jinja2", "rich")


@subcommand("inspect", examples=("an example",))
@option("Probe", "--count", type=Count(), default=1)
@option("Probe", "--stop", type=Text(), multiple=True)
@option("Probe", "--bias", type=LogitBias())
@option("Probe", "--flag/--no-flag", default=True)
@option("Probe", "--fail", help="Exception to raise.")
@click.pass_context
def probe(ctx: click.Context, /, fail: str | None, **values: object) -> None:
    """Show the values that arrived."""
    if fail is not None:
        raise {"interrupt": KeyboardInterrupt(), "key": KeyError("k"), "step": StepError("s")}[fail]
    settings = ctx.ensure_object(Run).settings
    console_of(ctx).json({**values, "quiet": settings.quiet, "progress": settings.progress})


@pytest.fixture(autouse=True)
def _probe_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "inspect", probe)


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, args, env=env)


def values(*args: str, env: dict[str, str] | None = None) -> dict[str, object]:
    result = run(*args, env=env)
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_imports_nothing_heavy(command: str | None) -> None:
    code = f"""
import sys
from trtllm_lite.tools.cli import cli
try:
    cli.main({[command, "--help"] if command else ["--help"]})
except SystemExit as end:
    assert end.code == 0
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    assert run("--version").stdout == f"trtllm-lite {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_groups_examples_and_environment(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert "Common options:" in result.stdout
    assert "TRTLLM_LITE_CONFIG" in result.stdout


def test_help_groups_options_and_names_their_variables() -> None:
    text = run("inspect", "-h").stdout
    probe_part = text[text.index("Probe options:") : text.index("Common options:")]
    assert "--count N" in probe_part
    assert "TRTLLM_LITE_INSPECT_COUNT" in probe_part
    assert "--quiet" not in probe_part
    assert text.rstrip().endswith("Examples:\n  an example")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["exprot"], "no command 'exprot'; did you mean export?"),
        (["zzz"], "no command 'zzz'; known: export, "),
        (["inspect", "--cuont", "2"], "--count"),
        (["inspect", "--count", "no"], "'no' is not a number"),
        (["inspect", "--count", "0"], "allowed: whole numbers from 1 on"),
        (["export", "model"], "Missing option '--output'"),
        (["chat"], "Missing argument 'BUNDLE'"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(args: list[str], said: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    assert "--help'" in result.stderr


@pytest.mark.parametrize(
    ("fail", "code", "said"),
    [
        ("interrupt", 130, "error: interrupted"),
        ("key", 1, "error: internal error: KeyError: 'k' (run again with --debug"),
        ("step", 1, "error: s"),
    ],
)
def test_failures_are_one_line_and_a_code(fail: str, code: int, said: str) -> None:
    result = run("inspect", "--fail", fail)
    assert result.exit_code == code
    assert result.stderr.strip().startswith(said)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("args", [("--debug", "inspect"), ("inspect", "--debug")])
def test_debug_shows_the_traceback(args: tuple[str, str]) -> None:
    result = run(*args, "--fail", "step")
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: s\n")


def test_an_error_is_an_event_where_progress_is_json() -> None:
    result = run("--progress", "json", "inspect", "--fail", "step")
    assert json.loads(result.stderr) == {"event": "error", "message": "s"}


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[inspect]\ncount = 2\n")
    env = {"TRTLLM_LITE_INSPECT_COUNT": "3"}
    config = ("--config", str(file))
    assert values("inspect")["count"] == 1
    assert values(*config, "inspect")["count"] == 2
    assert values("inspect", *config)["count"] == 2
    assert values("inspect", env={"TRTLLM_LITE_CONFIG": str(file)})["count"] == 2
    assert values(*config, "inspect", env=env)["count"] == 3
    assert values(*config, "inspect", "--count", "4k", env=env)["count"] == 4000


def test_the_table_of_a_command_wins_over_keys_for_all(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("count = 2\nflag = false\n[inspect]\ncount = 3\n")
    found = values("--config", str(file), "inspect")
    assert (found["count"], found["flag"]) == (3, False)


def test_common_options_keep_that_order_on_both_sides_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('progress = "plain"\n')
    env = {"TRTLLM_LITE_PROGRESS": "none"}
    config = ("--config", str(file))
    assert values(*config, "inspect")["progress"] == "plain"
    assert values("inspect", *config)["progress"] == "plain"
    assert values(*config, "inspect", env=env)["progress"] == "none"
    assert values(*config, "--progress", "json", "inspect", env=env)["progress"] == "json"
    assert values(*config, "inspect", "--progress", "json", env=env)["progress"] == "json"
    assert values("--quiet", "inspect")["quiet"] is True
    assert values("inspect", "-q")["quiet"] is True
    other = {"TRTLLM_LITE_CONFIG": "/not/there.toml"}
    assert values(*config, "inspect", env=other)["progress"] == "plain"


def test_values_of_every_kind_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    lines = ["count = '4K'", "stop = 'a b'", "bias = {5 = -1}", "flag = false"]
    file.write_text("\n".join(["quiet = true", "[inspect]", *lines]))
    assert values("--config", str(file), "inspect") == {
        **{"count": 4096, "stop": ["a b"], "bias": {"5": -1.0}, "flag": False},
        **{"quiet": True, "progress": "auto"},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cuont = 1", "cuont: inspect has no such option; did you mean count?"),
        ("[inspect]\nzzz = 1", "inspect.zzz: inspect has no such option; known: "),
        ("[inspekt]\ncount = 1", "no command [inspekt]; did you mean inspect?"),
        ("[bench]\nrepeat = 1", "bench.repeat: bench has no such option; did you mean repeats?"),
        ("config = 'x'", "config: inspect has no such option"),
        ("[inspect]\ncount = true", "inspect.count: got True; allowed: a number or text"),
        ("[inspect]\ncount = [1]", "inspect.count: got a list; allowed: one value"),
        ("[inspect]\nflag = 'yes'", "inspect.flag: got 'yes'; allowed: true or false"),
        ("[inspect]\ncount = 1979-05-27", "allowed: a number or text"),
        ("[inspect.count]\na = 1", "inspect.count: got a table; allowed: one value"),
        ("count = ", "not a TOML file: Invalid value (at end of document)"),
        ("count = 'x'", "'x' is not a number such as 512, 4k (4000) or 4K (4096). (from "),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path, text: str, said: str, before: bool
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    config = ("--config", str(file))
    result = run(*config, "inspect") if before else run("inspect", *config)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert str(file) in result.stderr
    assert said in result.stderr


def test_a_missing_file_is_one_line() -> None:
    result = run("--config", "/not/there.toml", "inspect")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: No such file or directory: /not/there.toml\n",
    )


def test_a_wrong_variable_is_named() -> None:
    result = run("inspect", env={"TRTLLM_LITE_INSPECT_COUNT": "x"})
    assert result.exit_code == 2
    assert "(from TRTLLM_LITE_INSPECT_COUNT)" in result.stderr


def program(*args: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "trtllm_lite", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )


@pytest.mark.parametrize("args", [("inspect", "--help"), ("completion", "fish")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_gets_no_traceback(args: tuple[str, str], unbuffered: str) -> None:
    child = program(*args, env={"PYTHONUNBUFFERED": unbuffered})
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    with child.stderr:
        assert child.stderr.read() == b""
    assert child.wait() == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_TRTLLM_LITE_COMPLETE" in result.stdout
    assert "trtllm-lite" in result.stdout


def test_the_program_completes_commands_and_options() -> None:
    env = {"_TRTLLM_LITE_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    out, _ = program(env={**env, "COMP_WORDS": "trtllm-lite ex"}).communicate()
    assert out.split() == [b"plain,export"]
    words = {"COMP_WORDS": "trtllm-lite bench --conc", "COMP_CWORD": "2"}
    out, _ = program(env={**env, **words}).communicate()
    assert out.split() == [b"plain,--concurrency"]
