"""serve: options to settings, what it says, and its exits."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.server.settings import key_digest
from trtllm_lite.runtime.server.tracing import NoTracer
from trtllm_lite.tools import serve_run
from trtllm_lite.tools.cli import cli


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The servers that the command would have run; they end at once with code 7."""
    servers: list[Any] = []

    def run(console: Any, server: Any, sock: socket.socket) -> int:
        servers.append(server)
        return 7

    monkeypatch.setattr(serve_run, "until_told", run)
    monkeypatch.setattr(serve_run, "configure_logging", lambda form: None)
    return servers


def serve(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, ["serve", "b", "--port", "0", *args], env=env)


def test_options_become_settings(started: list[Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nkey-b\n\n  key-c  \n")
    result = serve(
        *("--api-key", "key-a", "--api-key-file", str(keys), "--max-queue", "1k"),
        *("--request-timeout", "5", "--drain-timeout", "0", "--cors-origin", "http://a.test"),
    )
    assert result.exit_code == 7, result.output
    (server,) = started
    config = server._config
    assert config.key_digests == tuple(map(key_digest, ("key-a", "key-b", "key-c")))
    assert (config.max_queue, config.request_timeout, config.drain_timeout) == (1000, 5, 0)
    assert config.cors_origins == ("http://a.test",)
    assert config.host == "127.0.0.1"
    assert "key-" not in result.output


def test_what_watches_the_server_is_set(started: list[Any]) -> None:
    options = ("--metrics-alias", "vllm", "--stream-keep-alive", "3")
    assert serve(*options, "--otlp-endpoint", "http://127.0.0.1:4318").exit_code == 7
    assert serve().exit_code == 7
    watched, plain = started
    assert (watched._config.metrics_alias, watched._config.keep_alive_seconds) == ("vllm", 3)
    assert type(watched._tracer).__name__ == "OtelTracer"
    assert plain._config.metrics_alias is None
    assert isinstance(plain._tracer, NoTracer)


def test_a_key_may_come_from_the_environment(started: list[Any]) -> None:
    serve(env={"TRTLLM_LITE_SERVE_API_KEY": "key-a"})
    assert started[0]._config.key_digests == (key_digest("key-a"),)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--port", "70000"), "70000"),
        (("--max-queue", "-1"), "-1"),
        (("--request-timeout", "0"), "request_timeout"),
        (("--api-key", "a b"), "API key"),
        (("--kernels", "none"), "kernels"),
        (("--metrics-alias", "triton"), "triton"),
        (("--stream-keep-alive", "0"), "keep_alive_seconds"),
        (("--otlp-endpoint", "grpc://a.test:4317"), "otlp_endpoint: got 'grpc://a.test:4317'"),
    ],
)
def test_a_bad_option_is_one_line(started: list[Any], args: tuple[str, ...], text: str) -> None:
    result = serve(*args)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert text in result.stderr
    assert not started


def test_a_key_file_without_keys_is_refused(started: list[Any], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    result = serve("--api-key-file", str(tmp_path / "keys"))
    assert (result.exit_code, "no key" in result.stderr) == (2, True)


def test_a_port_in_use_is_one_line(started: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = serve("--port", port)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert f"port {port} of 127.0.0.1 is in use by " in line
    assert not started


def test_an_open_door_is_warned_of(started: list[Any]) -> None:
    assert "warning" not in serve().stderr
    assert "anybody" in serve("--host", "0.0.0.0").stderr
    assert "anybody" not in serve("--host", "0.0.0.0", "--api-key", "k").stderr


def test_names_are_checked_before_anything_else(started: list[Any]) -> None:
    result = serve("--served-model-name", "a b")
    assert (result.exit_code, "'a b'" in result.stderr) == (2, True)
    assert not started


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError):
        serve_run.server_config({**_values(), "max_queue": -5})


def _values() -> dict[str, Any]:
    return {
        **{"host": "127.0.0.1", "port": 0, "api_key": (), "max_queue": 1, "cors_origin": ()},
        **{"request_timeout": 1.0, "drain_timeout": 1.0, "step_timeout": 1.0},
        **{"stream_keep_alive": 1.0, "metrics_alias": None},
    }


def test_a_missing_bundle_ends_it_with_one_line(tmp_path: Path) -> None:
    result = run_program("serve", str(tmp_path / "none"), "--port", "0", "--progress", "none", "-q")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert result.stdout == ""


def run_program(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trtllm_lite", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
