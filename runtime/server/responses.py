"""JSON out, for every route that does not stream."""

from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Scope

from trtllm_lite.runtime.server.errors import ApiError, error_body


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_response(error: ApiError, scope: Scope) -> Response:
    """An error as every route tells it, to the client of that exchange."""
    headers = dict(error.headers)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = error_body(error, scope["path"], scope.get("state", {}).get("request_id"))
    return Response(body, error.status, headers, media_type="application/json")
