"""The server in front of replicas: the same layers and probes, everything else passed on."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from trtllm_lite.runtime.server.app import error_handlers, outer_layers, public_paths
from trtllm_lite.runtime.server.health import HealthRoutes
from trtllm_lite.runtime.server.metrics import CONTENT_TYPE
from trtllm_lite.runtime.server.openapi import OpenApiRoute
from trtllm_lite.runtime.server.pages import all_pages
from trtllm_lite.runtime.server.replicas.fleet import Fleet
from trtllm_lite.runtime.server.replicas.forward import Forward
from trtllm_lite.runtime.server.replicas.metrics import FrontMetrics, merged
from trtllm_lite.runtime.server.service import Service

FRONT = "front"
"""Where the label `replica` says so, a number is the front's own."""


class Front:
    """An application (`app`) over a fleet that may still be starting."""

    def __init__(self, service: Service, fleet: Fleet, version: str) -> None:
        self.numbers = FrontMetrics()
        self._service = service
        self._fleet = fleet
        self._forward = Forward(service, fleet, self.numbers)
        pages = all_pages()
        files = [route for each in pages for route in each.routes()]
        self.app = Starlette(
            routes=[*self._probes(version), *files, Route("/{path:path}", self._forward)],
            middleware=outer_layers(service.config, public_paths(pages)),
            exception_handlers=error_handlers(),
        )
        self.app.router.redirect_slashes = False

    def abort(self) -> None:
        """End all requests that run: their clients are told so."""
        self._forward.abort()

    def _probes(self, version: str) -> list[BaseRoute]:
        health = HealthRoutes(self._service, version)
        described = OpenApiRoute(self._service.config, version, passes_on=True)
        return [
            Route("/live", health.live, methods=["GET"]),
            *(
                Route(p, health.health, methods=["GET"])
                for p in ("/health", "/v1/health", "/ready")
            ),
            Route("/version", health.version, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/openapi.json", described.show, methods=["GET"]),
        ]

    async def _metrics(self, request: Request) -> Response:
        """Prometheus text: the replicas' numbers, each with its label, and the front's."""
        own = self._service.metrics.text()
        replicas = await self._fleet.metrics() if self._service.phase == "ready" else {}
        text = merged({FRONT: own, **replicas}) + self.numbers.text()
        return Response(text, headers={"content-type": CONTENT_TYPE})
