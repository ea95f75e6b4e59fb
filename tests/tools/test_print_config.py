"""--print-config: what a run would use, as a file that --config takes."""

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.tools.cli import cli


def printed(*args: str, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(cli, ["serve", *args, "--print-config"], env=env)
    assert result.exit_code == 0, result.output
    return result


def test_every_value_is_there_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[serve]\nmax-queue = 7\n")
    env = {"TRTLLM_LITE_SERVE_DRAIN_TIMEOUT": "5"}
    text = printed("m=b", "--port", "9", "--config", str(file), env=env).stdout
    lines = text.splitlines()
    assert lines[0] == "[serve]"
    assert 'bundle = ["m=b"]  # command line' in lines
    assert "port = 9  # command line" in lines
    assert f"max-queue = 7  # {file}" in lines
    assert "drain-timeout = 5.0  # environment" in lines
    assert 'host = "127.0.0.1"  # default' in lines
    assert "# threads is not set" in lines
    values = tomllib.loads(text)["serve"]
    assert (values["prefix-caching"], values["request-timeout"]) == (True, 600.0)


def test_what_is_printed_can_be_read_back(tmp_path: Path) -> None:
    odd = 'a "q" \\ \x7f é 😀'
    given = ("b", "--cors-origin", odd, "--alias", "x=b", "--alias", "y=b", "--no-spin")
    first = printed(*given).stdout
    file = tmp_path / "c.toml"
    file.write_text(first, encoding="utf-8")
    second = printed("--config", str(file)).stdout
    assert tomllib.loads(second) == tomllib.loads(first)
    assert tomllib.loads(first)["serve"]["cors-origin"] == [odd]


def test_keys_are_not_printed(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("from-file\n")
    files = ("--api-key-file", str(tmp_path / "keys"))
    env = {"TRTLLM_LITE_SERVE_API_KEY": "from-env"}
    for result in (printed("b", "--api-key", "from-line", *files), printed("b", env=env)):
        assert "from-" not in result.output
        assert "# api-key: 1 given, not shown" in result.stdout


@pytest.mark.parametrize("args", [("--request-timeout", "0"), ("--alias", "x=none")])
def test_what_would_be_refused_is_refused_here(args: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, ["serve", "b", *args, "--print-config"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
