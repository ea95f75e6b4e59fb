"""Routes beside the completions, and the size of requests."""

import socket
from collections.abc import Iterator

import pytest

from trtllm_lite.tools.conformance.frontend.client import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Frontend,
)

MEBIBYTE = b"x" * 2**20
TOO_MANY = 80  # mebibytes; Triton's limit is 64 of them
JSON = {"content-type": "application/json"}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def test_an_unknown_path_is_404(frontend: Frontend) -> None:
    assert frontend.http.get("/does-not-exist").status_code == 404


def test_another_method_is_405(frontend: Frontend) -> None:
    assert frontend.http.get(CHAT).status_code == 405


def test_it_says_that_it_is_ready(frontend: Frontend) -> None:
    assert frontend.http.get("/health/ready").status_code == 200


def test_it_has_metrics(frontend: Frontend) -> None:
    response = frontend.http.get("/metrics")
    assert response.status_code == 200
    assert "# TYPE" in response.text


def test_models_are_listed(frontend: Frontend) -> None:
    models = frontend.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == [MODEL]
    for model in models:
        assert model["object"] == "model"
        assert model["created"] > 0
        assert model["owned_by"]


def test_one_model_is_shown(frontend: Frontend) -> None:
    response = frontend.http.get(f"/v1/models/{MODEL}")
    assert (response.status_code, response.json()["id"]) == (200, MODEL)


def test_models_belong_to_triton(frontend: Frontend) -> None:
    model = frontend.http.get(f"/v1/models/{MODEL}").json()
    assert model["owned_by"] == "Triton Inference Server"


@BOTH
def test_a_large_body_is_413(frontend: Frontend, path: str) -> None:
    response = frontend.http.post(path, content=MEBIBYTE * TOO_MANY, headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"


@BOTH
def test_a_large_body_in_parts_is_413(frontend: Frontend, path: str) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(TOO_MANY):
            yield MEBIBYTE

    assert frontend.http.post(path, content=parts(), headers=JSON).status_code == 413


def test_a_large_body_is_called_content_too_large(frontend: Frontend) -> None:
    response = frontend.http.post(CHAT, content=MEBIBYTE * TOO_MANY, headers=JSON)
    assert response.json()["error"]["code"] == "content_too_large"


@pytest.mark.parametrize("length", ["not-a-number", "-1", "-1024"])
def test_a_wrong_content_length_is_400(frontend: Frontend, length: str) -> None:
    url = frontend.http.base_url
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=60) as client:
        client.sendall(head.encode() + b"{}")
        assert client.recv(4096).split()[1] == b"400"
