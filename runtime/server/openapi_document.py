"""The document: the routes of an application, described by the models that check requests
(OpenAPI 3.1, https://spec.openapis.org/oas/v3.1.0)."""

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from starlette.routing import BaseRoute, Route

from trtllm_lite.runtime.server.auth import HEALTH_PATHS
from trtllm_lite.runtime.server.openapi_operations import OPERATIONS, TAGS, Operation
from trtllm_lite.runtime.server.openapi_rules import Schema
from trtllm_lite.runtime.server.openapi_schemas import Schemas
from trtllm_lite.runtime.server.settings import Limits, ServerConfig

_CONVERTER = re.compile(r"\{(\w+):\w+\}")
_PARAMETER = re.compile(r"\{(\w+)\}")
_JSON = "application/json"
_HEADERS: dict[str, Schema] = {
    "x-request-id": {
        "description": "Of the request, or a new one where it has none that is plain.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
        "required": True,
    },
    "retry-after": {"description": "Seconds to wait.", "schema": {"type": "integer"}},
    "www-authenticate": {"schema": {"const": "Bearer"}, "required": True},
}
_DESCRIPTION = """An OpenAI-compatible server for one machine's models.

Null stands for a field that is left out, and unknown fields change nothing; a field that is known
and not served is refused by name. Errors have one shape on every route (and Anthropic's on the
routes of its API): 404 where there is no such route, 405 with `Allow` for another method.
/v1/capabilities tells what the fields do for the model that is served."""


def endpoints(routes: Iterable[BaseRoute]) -> set[tuple[str, str]]:
    """Method and path, as the document writes it, of each route. HEAD goes with GET."""
    return {
        (method, _CONVERTER.sub(r"{\1}", route.path))
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }


def document(
    routes: Iterable[BaseRoute] | None, config: ServerConfig, version: str
) -> dict[str, Any]:
    """The document over those routes that the table of operations describes; None: all of them."""
    served = None if routes is None else endpoints(routes)
    operations = [e for e in OPERATIONS if served is None or (e.method, e.path) in served]
    bodies = [each.body for each in operations if each.body is not None]
    answers = [model for each in operations for model in each.answers]
    schemas = Schemas(bodies, answers, config.limits)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        entry = _operation(each, schemas, keyed=bool(config.key_digests))
        paths.setdefault(each.path, {})[each.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "trtllm-lite",
            "version": version,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": _errors(schemas, config.limits, [each.fault for each in operations]),
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, schemas: Schemas, *, keyed: bool) -> Schema:
    made: Schema = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _responses(operation, schemas, keyed=keyed),
    }
    if keyed and operation.path not in HEALTH_PATHS:
        made["security"] = [{"bearer": []}, {"apiKey": []}]
    names = _PARAMETER.findall(operation.path)
    if names:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.body is not None:
        shown = {name: {"value": value} for name, value in operation.body.examples.items()}
        content = {"schema": schemas.ref(operation.body.model), "examples": shown}
        made["requestBody"] = {"required": True, "content": {_JSON: content}}
    return made


def _responses(operation: Operation, schemas: Schemas, *, keyed: bool) -> Schema:
    made: Schema = {}
    if operation.ok:
        made["200"] = {**_plain("OK"), "content": _content(operation, schemas)}
    for status, model in operation.others:
        content = {_JSON: {"schema": schemas.ref(model)}}
        made[str(status)] = {**_plain("Not now."), "content": content}
    for status in sorted(operation.errors):
        if status != 401 or keyed:
            name = _error_name(status, operation.fault)
            made[str(status)] = {"$ref": f"#/components/responses/{name}"}
    return made


def _content(operation: Operation, schemas: Schemas) -> Schema:
    if operation.media != _JSON:
        return {operation.media: {"schema": {"type": "string"}}}
    free: Schema = {"type": "object"}
    reply = free if operation.reply is None else schemas.ref(operation.reply)
    content: Schema = {_JSON: {"schema": reply}}
    if operation.events:
        content["text/event-stream"] = {"schema": _stream(operation, schemas)}
    return content


def _stream(operation: Operation, schemas: Schemas) -> Schema:
    """One event, as OpenAPI 3.2 writes events: 3.1 has no words for a sequence of them."""
    events = [schemas.ref(model) for model in operation.events]
    data: Schema = {
        "contentMediaType": _JSON,
        "contentSchema": events[0] if len(events) == 1 else {"anyOf": events},
    }
    if operation.done is not None:
        data = {"anyOf": [{"const": operation.done}, data]}
    return {
        "type": "object",
        "description": "Where the request says stream: server-sent events, of which this is one. "
        "A failure on the way is an event with an error object.",
        "properties": {"event": {"type": "string"}, "data": {"type": "string", **data}},
        "required": ["data"],
    }


def _errors(
    schemas: Schemas, limits: Limits, faults: Iterable[type[BaseModel]]
) -> dict[str, Schema]:
    """Every status that an error may have, in each of the shapes."""
    depth = f"JSON is nested {limits.depth} levels at most"
    texts = {
        400: f"The request can never be served as it is: `param` names the field. {depth}.",
        401: "No valid API key.",
        404: "There is no such model, or no such route.",
        405: "The route does not have that method.",
        408: f"The body did not arrive within {limits.body_seconds:g} s.",
        413: f"The body is larger than {limits.body_bytes} bytes.",
        431: f"More than {limits.headers} headers, or {limits.header_bytes} bytes of them.",
        500: "A fault of the server; its log has it under the request id.",
        501: "The server was installed without what this request needs.",
        503: "Not now: loading, draining, a full queue, or a request that took too long.",
    }
    made: dict[str, Schema] = {}
    for fault in dict.fromkeys(faults):
        content = {_JSON: {"schema": schemas.ref(fault)}}
        for status, text in texts.items():
            told = {**_plain(text, _OF_STATUS.get(status, ())), "content": content}
            made[_error_name(status, fault)] = told
    return made


def _error_name(status: int, fault: type[BaseModel]) -> str:
    return f"{fault.__name__}.{status}"


_OF_STATUS = {401: ("www-authenticate",), 503: ("retry-after",)}


def _plain(text: str, headers: Iterable[str] = ()) -> Schema:
    names = ("x-request-id", *headers)
    shown = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": text, "headers": shown}
