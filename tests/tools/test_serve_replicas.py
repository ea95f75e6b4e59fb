"""serve --replicas: options to a plan, and what each replica gets of the machine."""

import os
import pickle
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.loading import LoadOptions
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.runtime.server.replicas.plan import FleetPlan
from trtllm_lite.runtime.server.replicas.ray_environment import prepare
from trtllm_lite.runtime.server.replicas.ray_messages import cause
from trtllm_lite.runtime.server.replicas.scale import Scale
from trtllm_lite.runtime.server.settings import key_digest
from trtllm_lite.tools import serve_replicas
from trtllm_lite.tools.cli import cli
from trtllm_lite.tools.serve_models import Wanted
from trtllm_lite.tools.serve_replicas import Machine, Opening, replica_options
from trtllm_lite.tools.serve_run import Reads


class Planned:
    """What the command would have run."""

    folder = Path("logs")
    plan: FleetPlan
    server: Any

    def fleet(self, plan: FleetPlan) -> "Planned":
        self.plan = plan
        return self

    def run(self, console: Any, server: Any, sock: socket.socket) -> int:
        self.server = server
        server._announce()
        return 7


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    made = Planned()
    monkeypatch.setattr(serve_replicas, "ray_fleet", made.fleet)
    monkeypatch.setattr(serve_replicas, "until_told", made.run)
    monkeypatch.setattr(serve_replicas, "configure_logging", lambda form: None)
    monkeypatch.setattr(Machine, "this", classmethod(lambda cls: cls(8, 8 * 2**30)))
    return made


def serve(*args: str) -> Result:
    return CliRunner().invoke(cli, ["serve", *args, "--port", "0"])


def test_options_become_a_plan(planned: Planned, tiny_bundle: Path) -> None:
    options = ("--replicas", "1-4", "--max-num-seqs", "2", "--max-queue", "9", "--api-key", "k")
    names = ("--served-model-name", "a", "--alias", "b=a")
    result = serve(str(tiny_bundle), *options, *names, "--cors-origin", "http://a.test")
    assert result.exit_code == 7, result.output
    plan = planned.plan
    assert (plan.scale, plan.slots, plan.max_queue) == (Scale(1, 4), 2, 9)
    front, inside = planned.server._config, plan.replica.config
    assert front.key_digests == (key_digest("k"),)
    assert front.cors_origins == ("http://a.test",)
    assert (inside.key_digests, inside.cors_origins) == ((), ())
    assert inside.max_queue == front.max_queue
    assert "ready url=http://127.0.0.1:" in result.stdout
    assert "1 to 4 replicas, 2 slots and 2 threads each" in result.stderr
    assert "API keys: 1" in result.stderr
    opening = plan.replica.open
    assert isinstance(opening, Opening)
    assert opening.names == ["a", "b"]
    assert opening.models[0].bundle.is_absolute()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--replicas", "0"), "replicas: got 0"),
        (("--replicas", "many"), "such as 2 or 1-4"),
        (("--replicas", "2", "--otlp-endpoint", "http://x"), "--otlp-endpoint is not for"),
        (("--replicas", "2", "--max-num-seqs", "100000"), "max_num_seqs"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    planned: Planned, tiny_bundle: Path, args: tuple[str, ...], text: str
) -> None:
    result = serve(str(tiny_bundle), *args)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert text in line


def test_a_bundle_that_is_none_is_told_before_anything_starts(planned: Planned) -> None:
    result = serve("/nowhere/bundle", "--replicas", "2")
    assert result.exit_code == 1
    assert "does not exist" in result.stderr
    assert not hasattr(planned, "server")


def test_without_the_extra_the_pip_line_is_told(
    monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path
) -> None:
    monkeypatch.setattr(serve_replicas, "prepare", lambda: None)
    monkeypatch.setattr(serve_replicas, "configure_logging", lambda form: None)
    monkeypatch.setitem(sys.modules, "ray", None)
    result = serve(str(tiny_bundle), "--replicas", "2")
    assert result.exit_code == 1
    assert "ray is not installed: pip install 'trtllm-lite[ray]'" in result.stderr


def test_cores_and_memory_are_divided() -> None:
    models, machine = [Wanted(Path("b"), ("b",))], Machine(8, 1000)
    given = LoadOptions(prefix_cache_bytes=800)
    made = replica_options(given, models, Scale(1, 4), machine)
    assert (made.intra_op_num_threads, made.kv_bytes, made.prefix_cache_bytes) == (2, 125, 200)
    many = replica_options(given, models, Scale(1, 16), machine)
    assert many.intra_op_num_threads == 1
    own = replica_options(LoadOptions(intra_op_num_threads=3), models, Scale(2, 2), machine)
    assert own.intra_op_num_threads == 3
    unknown = replica_options(given, models, Scale(2, 2), Machine(8, None))
    assert unknown.kv_bytes is None


def test_several_bundles_share_what_one_replica_has(tiny_bundle: Path) -> None:
    models = [Wanted(tiny_bundle, ("a",)), Wanted(tiny_bundle, ("b",))]
    made = replica_options(LoadOptions(), models, Scale(2, 2), Machine(8, 2**30))
    assert made.kv_bytes is not None
    assert 0 < made.kv_bytes < 2**30 // 8
    with pytest.raises(UsageError, match="bundles hold"):
        replica_options(LoadOptions(), models, Scale(2, 2), Machine(8, 1000))


def test_what_opens_the_models_travels(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path) -> None:
    monkeypatch.setattr(serve_replicas, "configure_logging", lambda form: None)
    wanted = (Wanted(tiny_bundle, ("a", "b")),)
    options = LoadOptions(host_cache=False, intra_op_num_threads=1)
    opening = Opening(wanted, options, Reads(), "text")
    ((llm, card),) = pickle.loads(pickle.dumps(opening))()
    llm._finalizer()
    assert card.names == ("a", "b")


def test_ray_is_told_to_keep_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN": "old"})
    prepare()
    told = dict(os.environ)
    assert (told["RAY_USAGE_STATS_ENABLED"], told["RAY_AUTH_MODE"]) == ("0", "token")
    prepare()
    assert len({"old", told["RAY_AUTH_TOKEN"], os.environ["RAY_AUTH_TOKEN"]}) == 3


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (
            "Failed 3 times. Error:\n  File x\na.b.SomeError: files: it is damaged\n\n",
            "files: it is damaged",
        ),
        ("plain words: and more", "plain words: and more"),
        ("", ""),
    ],
)
def test_the_cause_is_the_last_line(told: str, text: str) -> None:
    assert cause(told) == text


@pytest.mark.parametrize("target", ["tensorrt", "cuda"])
def test_what_is_for_a_gpu_is_refused(
    planned: Planned, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    manifest = replace(read_manifest(tiny_bundle), target=target)
    monkeypatch.setattr(serve_replicas, "read_manifest", lambda folder: manifest)
    result = serve(str(tiny_bundle), "--replicas", "2")
    assert f"is for {target}, and replicas share cores, not a GPU" in result.stderr
    assert result.exit_code == 2
    on_cpu = serve(str(tiny_bundle), "--replicas", "2", "--backend", "onnxruntime")
    assert on_cpu.exit_code == (7 if target == "tensorrt" else 2)
    on_gpu = ("--backend", "onnxruntime", "--provider", "tensorrt")
    assert serve(str(tiny_bundle), "--replicas", "2", *on_gpu).exit_code == 2
