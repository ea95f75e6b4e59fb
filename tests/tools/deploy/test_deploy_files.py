"""The files of docs/deploy/ say only what the server does."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from trtllm_lite.runtime.server.auth import HEALTH_PATHS
from trtllm_lite.runtime.server.settings import Limits, ServerConfig
from trtllm_lite.tools.serve import serve

FOLDER = Path(__file__).parents[3] / "docs" / "deploy"


def values_of(arguments: list[str]) -> dict[str, Any]:
    """What `serve` makes of them. Fails for an option that it does not have."""
    context = serve.make_context("serve", list(arguments))
    return dict(context.params)


def documents() -> dict[str, Any]:
    text = (FOLDER / "kubernetes.yaml").read_text()
    made = list(yaml.safe_load_all(text))
    assert all(set(d) >= {"apiVersion", "kind", "metadata", "spec"} for d in made)
    return {document["kind"]: document for document in made}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = documents()["Deployment"]["spec"]["template"]["spec"]
    return spec


def test_the_pod_runs_a_command_that_serve_takes() -> None:
    (container,) = pod()["containers"]
    command, *arguments = container["args"]
    assert (container["command"], command) == (["trtllm-lite"], "serve")
    values = values_of(arguments)
    (port,) = container["ports"]
    assert (values["host"], values["port"]) == ("0.0.0.0", port["containerPort"])
    assert values["api_key_file"], "a server that others can reach asks for a key"


def test_the_probes_ask_routes_that_need_no_key() -> None:
    (container,) = pod()["containers"]
    paths = {p: container[f"{p}Probe"]["httpGet"]["path"] for p in ("startup", "readiness")}
    assert paths == {"startup": "/ready", "readiness": "/ready"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert {*paths.values(), "/live"} <= HEALTH_PATHS


def test_the_pod_is_killed_only_after_the_drain() -> None:
    (container,) = pod()["containers"]
    drain = values_of(container["args"][1:])["drain_timeout"]
    sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    readiness = container["readinessProbe"]
    noticed = readiness["periodSeconds"] * readiness["failureThreshold"]
    assert sleep > noticed
    assert pod()["terminationGracePeriodSeconds"] >= sleep + drain + 5


def test_nothing_but_the_volumes_can_be_written() -> None:
    (container,) = pod()["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod()["securityContext"]["runAsNonRoot"] is True
    mounts = {m["name"]: m for m in container["volumeMounts"]}
    assert set(mounts) == {v["name"] for v in pod()["volumes"]}
    (cache,) = [e["value"] for e in container["env"] if e["name"] == "XDG_CACHE_HOME"]
    assert mounts["cache"]["mountPath"] == cache
    written = {name for name, mount in mounts.items() if not mount.get("readOnly")}
    assert written == {"cache", "tmp"}


def test_the_service_finds_the_pods() -> None:
    found = documents()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    (container,) = pod()["containers"]
    (port,) = found["Service"]["spec"]["ports"]
    assert port["targetPort"] == container["ports"][0]["name"]


def test_the_pod_asks_for_what_it_may_take() -> None:
    """The server measures its threads with the cores that it may use."""
    resources = pod()["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    assert int(resources["limits"]["cpu"]) >= 1


def test_nginx_streams_retries_and_waits_as_long_as_the_server() -> None:
    text = re.sub(r"#.*", "", (FOLDER / "nginx.conf").read_text())
    told = [line.strip().rstrip(";") for line in text.splitlines() if line.strip().endswith(";")]
    words = {line.split()[0]: line.split()[1:] for line in told}
    assert text.count("{") == text.count("}")
    assert words["least_conn"] == []
    assert words["proxy_buffering"] == ["off"]
    assert {"non_idempotent", "http_503", "error"} <= set(words["proxy_next_upstream"])
    assert words["client_max_body_size"] == [f"{Limits().body_bytes // 2**20}m"]
    assert int(words["proxy_read_timeout"][0].rstrip("s")) > ServerConfig().request_timeout
    passed_on = int(words["proxy_next_upstream_timeout"][0].rstrip("s"))
    assert passed_on < ServerConfig().request_timeout


def test_the_unit_runs_a_command_that_serve_takes() -> None:
    lines = (FOLDER / "trtllm-lite.service").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    program, command, *arguments = shlex.split(pairs["ExecStart"])
    assert (Path(program).name, command) == ("trtllm-lite", "serve")
    values = values_of(arguments)
    assert int(pairs["TimeoutStopSec"]) > values["drain_timeout"]
    assert values["api_key_file"] == "${CREDENTIALS_DIRECTORY}/keys"
    assert pairs["LoadCredential"].startswith("keys:")
