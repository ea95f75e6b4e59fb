"""JSON out, for every route that does not stream."""

from typing import Any

import orjson
from starlette.responses import Response

from trtllm_lite.runtime.server.errors import ApiError, error_body


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """An error as every route tells it."""
    headers = dict(error.headers)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, media_type="application/json")
