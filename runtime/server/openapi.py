"""GET /openapi.json."""

import asyncio
from collections.abc import Iterable

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from trtllm_lite.runtime.server.settings import ServerConfig


class OpenApiRoute:
    """Describes one application. The document is made once, off the event loop, of the routes that
    the application has; of all there are where it `passes_on` what it has no route for."""

    def __init__(self, config: ServerConfig, version: str, *, passes_on: bool = False) -> None:
        self._config = config
        self._version = version
        self._passes_on = passes_on
        self._body: bytes | None = None

    async def show(self, request: Request) -> Response:
        """The document as JSON."""
        if self._body is None:
            loop = asyncio.get_running_loop()
            routes = None if self._passes_on else request.app.routes
            self._body = await loop.run_in_executor(None, self._made, routes)
        return Response(self._body, media_type="application/json")

    def _made(self, routes: Iterable[BaseRoute] | None) -> bytes:
        # Its types take a while to make, and a server is to be ready soon.
        from trtllm_lite.runtime.server.openapi_document import document

        return orjson.dumps(document(routes, self._config, self._version))
