"""The routes beside generation, and what lies in front of all of them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.routing import Route

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.server.auth import HEALTH_PATHS
from trtllm_lite.runtime.server.error_shapes import is_anthropic
from trtllm_lite.runtime.server.pages import all_pages
from trtllm_lite.runtime.server.service import ModelCard
from trtllm_lite.runtime.server.settings import Limits, ServerConfig, key_digest

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

KEYED = ServerConfig(key_digests=(key_digest("one"), key_digest("two")))
PAGES = frozenset(path for each in all_pages() for path in each.paths)
PUBLIC = HEALTH_PATHS | PAGES


def told(answer: Any) -> str:
    """The code of an error, or its type in the shape that has no code."""
    return str(answer.error.get("code", answer.error["type"]))


def test_models_are_listed_under_every_name(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        made = (await lab.get("/v1/models")).json()
        assert [m["id"] for m in made["data"]] == ["fake", "alias/two"]
        for model in made["data"]:
            assert (await lab.get(f"/v1/models/{model['id']}")).json() == model
            assert (model["object"], model["created"]) == ("model", 1_700_000_000)
            assert model["max_model_len"] == 64
            assert model["trtllm_lite"]["parity"]["passed"] is True
        answer = await lab.get("/v1/models/none")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")

    run_lab(test)


def test_text_becomes_ids_and_back(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        ids = lab.llm.tokenizer.encode("a day é")
        for field in ("prompt", "content"):
            made = (await lab.post("/tokenize", {field: "a day é"})).json()
            assert (made["tokens"], made["count"]) == (ids, len(ids))
            assert made["max_model_len"] == 64
        body = {"messages": [{"role": "user", "content": "ab"}], "return_token_strs": True}
        made = (await lab.post("/tokenize", body)).json()
        assert (made["tokens"], made["token_strs"]) == (
            lab.llm.tokenizer.encode("ab"),
            ["a", "b"],
        )
        back = await lab.post("/detokenize", {"tokens": [*ids, 0]})
        assert back.json() == {"prompt": "a day é<eos>"}

    run_lab(test)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * 5000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": "y"}]}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "y"}], "chat_template": "x"},
            "chat_template",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [500]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_bad_text_and_ids_are_refused(
    run_lab: RunLab, path: str, body: dict[str, Any], param: str
) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param)

    run_lab(test)


def test_capabilities_name_every_endpoint_that_generates(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        made = (await lab.get("/v1/capabilities")).json()
        assert set(made["endpoints"]) == {
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/responses",
        }
        assert made["limits"]["body_bytes"] == Limits().body_bytes
        assert made["endpoints"]["/v1/completions"]["max_tokens"]["default"] == 16

    run_lab(test)


def test_probes_and_version(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for path in sorted(HEALTH_PATHS):
            assert (await lab.get(path)).status == 200
        assert (await lab.get("/version")).json()["version"] == "9.9"

    run_lab(test)


def test_while_loading_everything_is_503_but_the_pages_and_live(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        lab.service.loading.step, lab.service.loading.percent = "pack the weights", 40
        for route in lab.app.routes:
            for method in route.methods - {"HEAD"}:
                path = route.path.replace("{id:path}", "fake")
                answer = await lab.start(method, path, {}).whole()
                if path in PAGES | {"/live", "/metrics"}:
                    assert answer.status == 200
                    continue
                code = "overloaded_error" if is_anthropic(path) else "loading"
                assert (answer.status, told(answer)) == (503, code), path
                assert "pack the weights, 40%" in answer.error["message"]
                assert answer.headers["retry-after"]
        assert (await lab.get("/health")).json()["percent"] == 40

    run_lab(test, loaded=False)


def all_requests(lab: Lab) -> list[tuple[str, str]]:
    routes = [route for route in lab.app.routes if isinstance(route, Route)]
    made = [(m, r.path.replace("{id:path}", "fake")) for r in routes for m in r.methods or ()]
    assert len(made) > 15
    return made


def test_every_route_needs_a_key_but_the_public_ones(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for method, path in [*all_requests(lab), ("GET", "/nowhere"), ("PUT", "/v1/models")]:
            for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
                answer = await lab.start(method, path, headers=headers).whole()
                if path in PUBLIC:
                    assert answer.status == 200
                    continue
                code = "authentication_error" if is_anthropic(path) else "invalid_api_key"
                assert (answer.status, told(answer)) == (401, code), path
                assert answer.headers["www-authenticate"] == "Bearer"
        for good in ({"authorization": "Bearer two"}, {"x-api-key": "one"}):
            assert (await lab.get("/v1/models", good)).status == 200
        both = {"authorization": "Bearer one", "x-api-key": "one"}
        assert (await lab.get("/v1/models", both)).status == 401

    run_lab(test, KEYED)


@pytest.mark.parametrize("host", ["a/health?", "a#", "", "health", "a/live#"])
@pytest.mark.parametrize(
    "path",
    ["/v1/models", "//v1/models", "/V1/models", "/health/../v1/models", "/health/", "/live?"],
)
def test_no_host_or_path_gets_around_the_key(run_lab: RunLab, host: str, path: str) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.get(path, {"host": host})
        assert answer.status == 401

    run_lab(test, KEYED)


def test_keys_are_kept_as_digests_only() -> None:
    assert "k-4711" not in repr(ServerConfig(key_digests=(key_digest("k-4711"),)))
    for bad in ("", "a b", "kéy", "a\n"):
        with pytest.raises(UsageError):
            key_digest(bad)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/models", 405),
        ("POST", "/metrics", 405),
    ],
)
def test_what_is_not_there_is_said_in_json(
    run_lab: RunLab, method: str, path: str, status: int
) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.start(method, path).whole()
        assert answer.status == status
        assert answer.error["message"]
        if status == 405:
            assert answer.headers["allow"]

    run_lab(test)


def test_request_ids_come_back_if_they_are_plain(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for path in ("/health", "/nowhere"):
            assert (await lab.get(path, {"x-request-id": "abc-1"})).headers[
                "x-request-id"
            ] == "abc-1"
            for bad in ("", "a b", "x" * 65, "a\x1b[31m"):
                made = (await lab.get(path, {"x-request-id": bad})).headers["x-request-id"]
                assert made.startswith("req-")

    run_lab(test)


def test_cors_is_closed_unless_opened(run_lab: RunLab) -> None:
    ask = {"origin": "http://a.test", "access-control-request-method": "POST"}

    async def closed(lab: Lab) -> None:
        for answer in (
            await lab.get("/health", ask),
            await lab.start("OPTIONS", "/v1/models", headers=ask).whole(),
        ):
            assert not [name for name in answer.headers if name.startswith("access-control")]

    async def opened(lab: Lab) -> None:
        answer = await lab.start("OPTIONS", "/v1/chat/completions", headers=ask).whole()
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "http://a.test"
        for names in (
            "authorization,content-type,x-stainless-lang,x-stainless-os,x-stainless-retry-count",
            "x-api-key,anthropic-version,anthropic-beta,anthropic-dangerous-direct-browser-access",
        ):
            asked = {**ask, "access-control-request-headers": names}
            answer = await lab.start("OPTIONS", "/v1/messages", headers=asked).whole()
            assert answer.status == 200, answer.body
            allowed = answer.headers["access-control-allow-headers"].lower().split(", ")
            assert set(names.split(",")) <= set(allowed)
        asked = {**ask, "access-control-request-headers": "x-other"}
        assert (await lab.start("OPTIONS", "/v1/models", headers=asked).whole()).status == 400
        other = await lab.get("/health", {"origin": "http://b.test"})
        assert "access-control-allow-origin" not in other.headers
        refused = await lab.get("/v1/models", {"origin": "http://a.test"})
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == "http://a.test"

    run_lab(closed)
    run_lab(opened, ServerConfig(cors_origins=("http://a.test",), key_digests=(key_digest("k"),)))


def test_too_many_headers_are_refused(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        many = {f"x-{i}": "1" for i in range(200)}
        assert (await lab.get("/health", many)).status == 431

    run_lab(test)


def test_an_unexpected_error_is_500_without_details(
    run_lab: RunLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(lab: Lab) -> None:
        def broken(name: str | None) -> Any:
            raise KeyError("secret of /etc/shadow")

        monkeypatch.setattr(lab.service, "resolve", broken)
        for answer in (await lab.get("/v1/models/fake"), await lab.chat()):
            assert (answer.status, answer.error["type"]) == (500, "server_error")
            assert b"secret" not in answer.body
            assert answer.headers["x-request-id"]

    run_lab(test)
    assert "secret" in caplog.text


def test_the_access_log_has_no_prompt_and_no_key(
    run_lab: RunLab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def test(lab: Lab) -> None:
        body = {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 1}
        await lab.post("/v1/chat/completions", body, {"authorization": "Bearer one"})

    run_lab(test, KEYED)
    (record,) = [r for r in caplog.records if r.name == "trtllm_lite.access"]
    facts = vars(record)["facts"]
    assert (facts["status"], facts["path"]) == (200, "/v1/chat/completions")
    assert "secret" not in json.dumps(facts)
    assert "one" not in json.dumps(facts)


def test_metrics_tell_of_the_engine_and_change_nothing(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        await lab.chat("hello", max_tokens=6, ignore_eos=True)
        await lab.idle()
        first, second = await lab.get("/metrics"), await lab.get("/metrics")
        assert first.body == second.body
        assert first.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert await lab.metric("kv_slots_total") == 3
        assert await lab.metric("prompt_tokens_total") == 5
        assert await lab.metric("generation_tokens_total") == 6
        assert await lab.metric("requests_running") == 0
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert await lab.metric(f"{name}_seconds_count") == 1

    run_lab(test)


def test_pages_are_served_with_a_strict_policy(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        for path in PAGES:
            answer = await lab.get(path)
            assert answer.status == 200
            assert answer.body
            assert "default-src 'self'" in answer.headers["content-security-policy"]
        for path in ("/static/../auth.py", "/static/", "/static/none.js"):
            assert (await lab.get(path)).status == 404

    run_lab(test)


@pytest.mark.parametrize("name", ["", "a b", "x" * 201, "é", "a\n"])
def test_a_model_name_is_plain(name: str) -> None:
    with pytest.raises(UsageError):
        ModelCard((name,), 0, "fp")


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 70000},
        {"max_queue": -1},
        {"request_timeout": 0},
        {"request_timeout": float("nan")},
        {"drain_timeout": -1},
        {"keep_alive_seconds": float("inf")},
    ],
)
def test_a_bad_setting_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        ServerConfig(**fields)
