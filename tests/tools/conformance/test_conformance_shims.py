"""What stands between a foreign suite and our server."""

import functools
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trtllm_lite.tools.conformance.shims import llamacpp
from trtllm_lite.tools.conformance.shims.absent import AbsentError, AbsentFinder
from trtllm_lite.tools.conformance.shims.recorder import why_of
from trtllm_lite.tools.conformance.shims.servers import Servers
from trtllm_lite.tools.conformance.shims.vllm import (
    Bundle,
    RemoteServer,
    translated,
)

# Says that it is ready, at a port that is the number of its words; writes its end into the log.
FAKE = """
import json, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
print(json.dumps({"event": "ready", "url": f"http://127.0.0.1:{len(sys.argv)}"}), flush=True)
time.sleep(60)
"""
WORDS = 5  # of a server without options: -c, --port 0, --log-format json


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers([sys.executable, "-c", FAKE], tmp_path / "log")
    yield made
    made.close()


def test_one_server_for_each_set_of_options(servers: Servers) -> None:
    plain, keyed = servers.get(), servers.get("--api-key", "k")
    assert (plain.port, keyed.port) == (WORDS, WORDS + 2)
    assert plain.url == f"http://127.0.0.1:{WORDS}"
    assert servers.get() is plain
    servers.drop("--api-key", "k")
    assert keyed.process.returncode is not None
    assert servers.get("--api-key", "k") is not keyed


def test_all_servers_are_told_to_end(tmp_path: Path) -> None:
    servers = Servers([sys.executable, "-c", FAKE], tmp_path / "log")
    running = servers.get()
    servers.close()
    assert running.process.returncode == 1
    assert "ended" in (tmp_path / "log").read_text()


def test_a_server_that_ends_at_once_is_told_of(tmp_path: Path) -> None:
    servers = Servers([sys.executable, "-c", "raise SystemExit('no')"], tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"did not start: .*log"):
        servers.get()


class FakeProcess:
    """The suite's `ServerProcess`, as much of it as is replaced."""

    def __init__(self) -> None:
        self.api_key: str | None = None
        self.server_port = 8080

    def make_request(self, method: str, path: str, data: Any = None) -> tuple[str, str, Any]:
        return method, path, data

    def make_stream_request(self, method: str, path: str, data: Any = None) -> str:
        return path


def test_llamacpps_process_is_ours(servers: Servers) -> None:
    utils = ModuleType("utils")
    vars(utils)["ServerProcess"] = type("Process", (FakeProcess,), {})
    llamacpp.redirect(utils, servers)
    process = utils.ServerProcess()
    process.server_port = 8081
    assert process.server_port == WORDS
    process.api_key = "k"
    assert process.server_port == WORDS + 2
    asked = process.make_request("POST", "/chat/completions", data={"a": 1})
    assert asked == ("POST", "/v1/chat/completions", {"a": 1})
    assert process.make_request("GET", "/health")[1] == "/health"
    assert process.make_stream_request("POST", "/responses") == "/v1/responses"
    assert process.make_stream_request("POST", "/v1/responses") == "/v1/responses"


@pytest.mark.parametrize(
    ("args", "ours"),
    [
        ([], ()),
        (["--dtype", "half", "--enforce-eager"], ()),
        (["--api-key", "k", "--max-model-len", "9"], ("--api-key", "k", "--max-model-len", "9")),
        (["--max_model_len=9000"], ("--max-model-len", "100")),
        (["--tool-call-parser=hermes"], ("--tool-call-parser", "hermes")),
        (["--shutdown-timeout", "3"], ("--drain-timeout", "3")),
        (
            ["--lora-modules", "a=/x", "b=/y", "--seed", "0"],
            ("--served-model-name", "a", "--served-model-name", "b"),
        ),
    ],
)
def test_options_of_vllm_become_ours(args: list[str], ours: tuple[str, ...]) -> None:
    assert translated(args, longest=100) == ours


@pytest.fixture
def remote(servers: Servers, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """The servers that a `RemoteServer` starts."""
    monkeypatch.setattr(RemoteServer, "servers", servers, raising=False)
    monkeypatch.setattr(RemoteServer, "bundle", Bundle.read(tiny_bundle), raising=False)
    return servers


def test_vllms_server_is_ours_under_its_name(remote: Servers) -> None:
    options = ("--served-model-name", "org/model", "--api-key", "k")
    with RemoteServer("org/model", ["--api-key", "k"], env_dict={"A": "1"}) as server:
        running = remote.get(*options)
        assert server.url_for("v1", "models") == f"{running.url}/v1/models"
        assert (server.proc, server.port) == (running.process, WORDS + 4)
    assert running.process.returncode is not None


@pytest.mark.parametrize(("package", "path"), [("openai", "/v1"), ("anthropic", "")])
def test_its_clients_do_not_try_again(
    remote: Servers, monkeypatch: pytest.MonkeyPatch, package: str, path: str
) -> None:
    module = ModuleType(package)
    names = ("OpenAI", "AsyncOpenAI", "Anthropic", "AsyncAnthropic")
    vars(module).update({name: functools.partial(dict, made=name) for name in names})
    monkeypatch.setitem(sys.modules, package, module)
    suffix, kind = ("", "OpenAI") if package == "openai" else ("_anthropic", "Anthropic")
    with RemoteServer("m") as server:
        expected: dict[str, Any] = {"base_url": server.url_root + path, "max_retries": 0}
        expected |= {"timeout": 600, "api_key": server.DUMMY_API_KEY}
        assert getattr(server, f"get_client{suffix}")() == expected | {"made": kind}
        made = getattr(server, f"get_async_client{suffix}")(timeout=1)
        assert made == expected | {"timeout": 1, "made": f"Async{kind}"}


def test_what_tests_know_of_the_model_is_the_bundles(tiny_bundle: Path) -> None:
    manifest = json.loads((tiny_bundle / "bundle.json").read_text())
    bundle = Bundle.read(tiny_bundle)
    assert bundle.longest == manifest["limits"]["max_model_len"]
    assert bundle.config(model="x").get_vocab_size() == manifest["model"]["vocab_size"]


def test_absent_packages_may_be_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = AbsentFinder(["no_such_package"], {"no_such_package.inner.deep.known": 7})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    found = importlib.import_module("no_such_package.inner.deep")
    thing = found.Thing.attribute
    assert found.known == 7
    assert repr(thing) == "no_such_package.inner.deep.Thing.attribute"
    assert not hasattr(found, "__wrapped__")
    with pytest.raises(AbsentError, match=r"Thing\.attribute is not here"):
        thing(1)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_package")
    for name in [name for name in sys.modules if name.startswith("no_such_package")]:
        monkeypatch.delitem(sys.modules, name)


def test_installed_packages_are_not_hidden() -> None:
    assert AbsentFinder(["json"], {}).find_spec("json", None) is None
    assert AbsentFinder(["no_such_package"], {}).find_spec("no_such_package", None) is not None


class Report:
    """A report as much as its error goes."""

    def __init__(self, message: str | None, text: str) -> None:
        crash = None if message is None else SimpleNamespace(message=message)
        self.longrepr = SimpleNamespace(reprcrash=crash)
        self.longreprtext = text


@pytest.mark.parametrize(
    ("message", "text", "why"),
    [
        ("AssertionError: so\nassert 1 == 2", "f.py:3: in test", "AssertionError: so"),
        (None, "while importing\nTraceback\nE   no module\n", "no module"),
        (None, "", ""),
        ("x" * 999, "", "x" * 300),
    ],
)
def test_why_a_test_failed_is_one_line(message: str | None, text: str, why: str) -> None:
    report: Any = Report(message, text)
    assert why_of(report) == why
