"""/openapi.json: it has every route and no other, and says what is checked."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from trtllm_lite.runtime.server.app import create_app
from trtllm_lite.runtime.server.openapi import OpenApiRoute
from trtllm_lite.runtime.server.openapi_document import document, endpoints
from trtllm_lite.runtime.server.openapi_operations import OPERATIONS, TAGS
from trtllm_lite.runtime.server.pages import all_pages
from trtllm_lite.runtime.server.protocol.chat import CHAT_REFUSED
from trtllm_lite.runtime.server.protocol.common import NO_EFFECT, REFUSED
from trtllm_lite.runtime.server.service import Service
from trtllm_lite.runtime.server.settings import Limits, ServerConfig, key_digest

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]


def app_of(config: ServerConfig) -> Starlette:
    return create_app(Service(config), "9.9")


def described(config: ServerConfig | None = None) -> dict[str, Any]:
    config = config or ServerConfig()
    return document(app_of(config).routes, config, "9.9")


DOCUMENT = described()


def inside(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in JSON data."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from inside(item)


def test_every_route_is_described_and_every_description_is_a_route() -> None:
    pages = {("GET", path) for each in all_pages() for path in each.paths}
    served = endpoints(app_of(ServerConfig()).routes)
    assert pages <= served
    assert served - pages == {(each.method, each.path) for each in OPERATIONS}
    listed = {(m.upper(), path) for path, entry in DOCUMENT["paths"].items() for m in entry}
    assert listed == served - pages


def test_a_front_that_passes_requests_on_describes_all_routes() -> None:
    async def ask() -> Any:
        described = OpenApiRoute(ServerConfig(), "9.9", passes_on=True)
        app = Starlette(routes=[Route("/openapi.json", described.show)])
        scope = {"type": "http", "method": "GET", "path": "/openapi.json", "app": app}
        return json.loads(bytes((await described.show(Request(scope))).body))

    assert asyncio.run(ask()) == DOCUMENT


def test_the_table_names_each_route_once_under_a_known_tag() -> None:
    assert len({(each.method, each.path) for each in OPERATIONS}) == len(OPERATIONS)
    assert len({each.name for each in OPERATIONS}) == len(OPERATIONS)
    assert {each.tag for each in OPERATIONS} == set(TAGS)


def test_all_references_lead_somewhere_and_all_schemas_are_sound() -> None:
    for found in inside(DOCUMENT):
        if "$ref" in found:
            place: Any = DOCUMENT
            for part in found["$ref"].removeprefix("#/").split("/"):
                place = place[part]
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_the_document_is_served_and_needs_the_key(run_lab: RunLab) -> None:
    config = ServerConfig(key_digests=(key_digest("k"),))

    async def test(lab: Lab) -> None:
        assert (await lab.get("/openapi.json")).status == 401
        for _ in range(2):
            answer = await lab.get("/openapi.json", {"authorization": "Bearer k"})
            assert answer.headers["content-type"] == "application/json"
            assert answer.json() == described(config)

    run_lab(test, config)


def test_keys_are_asked_for_where_the_server_does() -> None:
    assert not [found for found in inside(DOCUMENT["paths"]) if "security" in found]
    assert not [found for found in inside(DOCUMENT["paths"]) if "401" in found]
    keyed = described(ServerConfig(key_digests=(key_digest("k"),)))["paths"]
    secured = {path for path, entry in keyed.items() for op in entry.values() if "security" in op}
    assert set(keyed) - secured == {"/live", "/health", "/v1/health", "/ready"}
    assert "401" in keyed["/v1/models"]["get"]["responses"]


def test_limits_are_those_of_the_settings() -> None:
    made = described(ServerConfig(limits=Limits(prompts=7, body_bytes=12345, depth=9)))
    prompt = made["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert [each["maxItems"] for each in prompt["anyOf"] if "maxItems" in each] == [7, 7]
    errors = made["components"]["responses"]
    assert "12345" in errors["ErrorReply.413"]["description"]
    assert "9 levels" in errors["ErrorReply.400"]["description"]


def test_refused_fields_take_what_asks_for_nothing_and_say_why() -> None:
    properties = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    for name, entry in {**REFUSED, **CHAT_REFUSED}.items():
        assert properties[name]["enum"] == [None, *entry.neutral]
        assert entry.reason in properties[name]["description"]
    for name in NO_EFFECT:
        assert "without effect" in properties[name]["description"]
